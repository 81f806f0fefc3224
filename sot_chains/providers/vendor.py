"""Completions through a vendor's SDK, which sends the requests; the replies are read here.

A request is one HTTP attempt: the SDKs' own retries are off, since every attempt must count against the rate
limits and in the trace. The SDKs are generated alike: their clients and errors have the same names.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from contextlib import aclosing
from hashlib import blake2b
from operator import attrgetter
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import httpx2
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from pydantic import SecretStr

from sot_chains.providers.base import WORDS, Delta, PrefillRefusedError, ProviderError, with_results
from sot_chains.providers.callbacks import nobody_listens, reported
from sot_chains.providers.errors import ReportedError, broke_off, explain, parse_pause, parse_remaining
from sot_chains.providers.replies import Reply, read

_Clients = dict[Hashable, Any]
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[_Clients, AsyncGenerator[None, None]]] = (
    WeakKeyDictionary()
)


async def find_clients() -> _Clients:
    """The running loop's clients, by their settings."""
    loop = asyncio.get_running_loop()
    if loop not in _loops:
        for closed in [other for other in list(_loops) if other.is_closed()]:
            del _loops[closed]  # its connections refer to it, so it would never be collected
        clients: _Clients = {}
        lifetime = _lifetime(clients)
        _loops[loop] = clients, lifetime
        await anext(lifetime)
    return _loops[loop][0]


async def close_clients() -> None:
    """Closes every connection that named models have open on the running event loop.

    ``asyncio.run`` does this when it ends. Call it in a long-lived loop while no closed models are needed.
    Calls in flight fail.
    """
    if opened := _loops.pop(asyncio.get_running_loop(), None):
        _, lifetime = opened
        await lifetime.aclose()


async def _lifetime(clients: _Clients) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        while clients:
            _, client = clients.popitem()
            await client.close()


_PREFILL_REFUSED = re.compile(WORDS["errors"]["prefill"], re.IGNORECASE)
_without_prefill: set[Hashable] = set()  # models that refused it, for the life of the process
# Of the SDKs' methods for a request. Other fields are the server's.
_ARGUMENTS = {"model", "messages", "max_tokens", "stream", "timeout", "extra_headers", "extra_query"}
_ADDRESS = re.compile(r"https?://[^/\s]+(?!\S*/(completions|responses|messages)$)\S*", re.IGNORECASE)
# Common servers close a connection after 5 s of idleness, which is also how long httpx2 keeps one: a request
# sent at that moment is lost. So ours expire earlier.
_LIMITS = httpx2.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=4.0)


class VendorProvider:
    """Streams completions from a vendor's API.

    Args:
        model: The model's name, as the server knows it.
        base_url: The URL of the server. By default the environment variable ``OPENAI_BASE_URL`` or
            ``ANTHROPIC_BASE_URL``, or else the vendor's own.
        api_key: Kept secret: never logged, traced or shown. By default the environment variable
            ``OPENAI_API_KEY`` or ``ANTHROPIC_API_KEY``, or else a placeholder for servers at another
            ``base_url``, which mostly want none.
        prefill: Whether the model continues a final assistant message; ``None`` to find out from the API's
            response to the first such request.
        service_tier: The tier of every request, such as OpenAI's ``"fast"`` and ``"flex"``.
        speed: Anthropic's ``"fast"``, which other vendors do not have.
        **client_options: Passed to the SDK's client: ``timeout`` (seconds), ``default_headers``, and so on.
    """

    vendor: ClassVar[str]
    vendor_url: ClassVar[str] = ""
    sdk: ClassVar[Any]  # its module
    endpoint: ClassVar[str]  # of a client of the SDK

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | SecretStr | None = None,
        prefill: bool | None = None,
        service_tier: str | None = None,
        speed: str | None = None,
        **client_options: Any,
    ) -> None:
        if not model:
            raise ValueError(f'the model has no name; write "{self.vendor}:MODEL"')
        if speed and self.vendor != "anthropic":
            raise ValueError(f"speed={speed!r} is a field of Anthropic's alone: pass service_tier={speed!r}")
        given = {"service_tier": service_tier, "speed": speed}
        self.tier_fields = {name: value for name, value in given.items() if value}  # of every request
        self._model = model
        self._base_url = (base_url or self._variable("BASE_URL") or self.vendor_url).strip().rstrip("/")
        if not _ADDRESS.fullmatch(self._base_url):
            expected = "expected http://HOST:PORT/v1 or the like, without /chat/completions"
            raise ValueError(f"base_url={self._base_url!r} is not the address of an API: {expected}")
        self._api_key = SecretStr(api_key) if isinstance(api_key, str) else api_key
        self._prefill = prefill
        self._client_options = {"max_retries": 0, **client_options}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._model!r}, base_url={self._base_url!r})"

    def __deepcopy__(self, memo: object) -> Self:
        return self  # it holds nothing but settings, by which its client is found

    def __getstate__(self) -> dict[str, Any]:
        if "http_client" in self._client_options:
            raise TypeError(
                "a model with http_client=... cannot be pickled, since the client belongs to this process; "
                "omit http_client, and pass timeout=... or default_headers=... instead"
            )
        return self.__dict__

    @property
    def model_name(self) -> str:
        """The model's name, as the server knows it."""
        return self._model

    @property
    def is_elsewhere(self) -> bool:
        """Whether the server is not the vendor's own, so that any model may run there."""
        return self._base_url != self.vendor_url

    @property
    def supports_prefill(self) -> bool:
        """Whether the model continues a final assistant message, as far as is known."""
        return self._prefill is not False and not self.has_refused_prefill

    @property
    def has_refused_prefill(self) -> bool:
        """Whether the API has refused a prefilled reply for this model."""
        return self._identity in _without_prefill

    @property
    def account(self) -> Hashable:
        """Identifies the account: equal for all providers whose requests count against the same limits."""
        key = self.find_key()
        digest = blake2b(key.encode(), digest_size=8).hexdigest() if key else None
        return (*self._identity, digest)

    @property
    def _identity(self) -> tuple[str, str, str]:
        return self.vendor, self._base_url, self._model

    def stream(
        self, messages: Sequence[BaseMessage], *, config: RunnableConfig, **kwargs: Any
    ) -> AsyncGenerator[Delta, None]:
        """Sends one request and yields the completion of ``messages`` as it arrives."""
        deltas = self._deltas(messages, self.tier_fields | kwargs if self.tier_fields else kwargs)
        if nobody_listens(config):
            return deltas
        return reported(deltas, config, messages, model=self._model, parameters=kwargs)

    async def _deltas(
        self, messages: Sequence[BaseMessage], parameters: dict[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        request = self._request(with_results(messages), parameters)
        client = await self._client()
        reply = Reply(self._model)
        headers: Mapping[str, str] = {}
        try:
            sent = await attrgetter(self.endpoint)(client).create(**_arguments(request))
            async with sent:  # closes the request however this ends
                headers = sent.response.headers
                pause, remaining = parse_pause(headers), parse_remaining(headers)
                if pause or remaining:
                    yield Delta(pause_seconds=pause, remaining=remaining)
                async with aclosing(read(sent.response.aiter_bytes(), reply, self._parse)) as deltas:
                    async for delta in deltas:
                        yield delta
        # Besides those of sending: an event that is no JSON or no text, which are values.
        except (self.sdk.APIError, httpx2.HTTPError, OSError, ReportedError, ValueError) as error:
            explained = explain(error, self.sdk, server=self._base_url, model=self._model, headers=headers)
            is_begun = messages and messages[-1].type == "ai"
            if is_begun and explained.status in (400, 422) and _PREFILL_REFUSED.search(str(explained)):
                _without_prefill.add(self._identity)
                said = f"model {self._model!r} does not continue a prefilled reply: {explained}"
                raise PrefillRefusedError(said, status=explained.status) from error
            raise explained from error
        if not reply.is_whole:
            raise broke_off(self._base_url, "the stream ended without a finish reason")
        metadata = {"model_name": reply.model, **({"service_tier": reply.tier} if reply.tier else {})}
        yield Delta(reply.end(), reply.take_usage(), reply.finish_reason, metadata)

    def _request(self, messages: Sequence[BaseMessage], parameters: dict[str, Any]) -> dict[str, Any]:
        """The fields of the request, as the SDK's method for it takes them."""
        raise NotImplementedError

    def _parse(self, payload: Mapping[str, Any], reply: Reply) -> Delta:
        """Reads an event, or a reply in one piece, into ``reply``."""
        raise NotImplementedError

    async def _client(self) -> Any:
        key, name = self.find_key(), f"{self.vendor.upper()}_API_KEY"
        if key is None or not key.isascii():
            wrong = "there is no API key for" if key is None else "a letter of the API key is no ASCII, for"
            advice = f"pass api_key=... or set {name}; for a server of your own pass base_url=..."
            raise ProviderError(f"{wrong} {self._base_url}: {advice}", is_unbilled=True)
        clients, options = await find_clients(), dict(self._client_options)
        settings = self.vendor, self._base_url, key, repr(sorted(options.items()))
        if settings not in clients:
            try:
                if "http_client" not in options:
                    options["http_client"] = self.sdk.DefaultAsyncHttpxClient(limits=_LIMITS)
                made = self.sdk.AsyncClient(base_url=self._base_url, api_key=key, **options)
            except (ValueError, ImportError) as error:  # such as of the environment's ALL_PROXY
                raise ProviderError(f"no client for {self._base_url}: {error}", is_unbilled=True) from error
            clients[settings] = made
        return clients[settings]

    def _variable(self, name: str) -> str | None:
        return os.environ.get(f"{self.vendor.upper()}_{name}")

    def find_key(self) -> str | None:
        """The key that requests are sent with; ``None`` if there is none."""
        # Servers of one's own mostly want none, and are sent a placeholder.
        given = self._api_key.get_secret_value() if self._api_key else self._variable("API_KEY")
        return (given or "").strip() or ("not-needed" if self.is_elsewhere else None)


def _arguments(request: dict[str, Any]) -> dict[str, Any]:
    """``request`` as arguments of the SDK, which has no say about fields that it does not need to know."""
    body = {name: request.pop(name) for name in request.keys() - _ARGUMENTS}
    return {**request, "extra_body": body | (body.pop("extra_body", None) or {})}
