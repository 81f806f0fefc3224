"""What all providers that use a vendor's SDK have in common.

A request is one HTTP attempt: the SDKs' own retries are off, since every attempt must count against the rate
limits and in the trace. Each completion is reported to the callback handlers, if any, as a chat model run.
The SDKs are generated alike: their clients and errors have the same names. Knows no vendor's requests.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any, ClassVar

import httpx2
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig
from pydantic import SecretStr

from sot_chains.providers.base import Delta, PrefillRefusedError, ProviderError, SharedPrefix
from sot_chains.providers.callbacks import chat_run, nobody_listens
from sot_chains.providers.http import client_of, rate_limits_of, retry_after_seconds_of

_PREFILL_REFUSED = re.compile(r"prefill|must end with a user message", re.IGNORECASE)
_REFUSED_STATUSES = frozenset({429, 503, 529})  # too busy: no work was done
_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
# Called when a request is sent, by providers that can tell; the caller sets it in the same task.
on_sent: ContextVar[Callable[[], None] | None] = ContextVar("on_sent", default=None)
_without_prefill: set[Hashable] = set()  # models that refused it, for the life of the process


class VendorProvider(ABC):
    """Streams completions from a vendor's API.

    Args:
        model: The model's name, as the server knows it.
        base_url: The URL of the server.
        api_key: Kept secret: never logged, traced or shown.
        prefill: Whether the model continues a final assistant message; ``None`` to find out from the API's
            response to the first such request.
    """

    vendor: ClassVar[str]
    vendor_url: ClassVar[str] = ""
    tells_when_sent: bool = False  # whether ``on_sent`` is called for each request

    def __init__(
        self, model: str, *, base_url: str, api_key: str | SecretStr | None, prefill: bool | None
    ) -> None:
        if not model:
            raise ValueError(f'the model has no name; write "{self.vendor}:MODEL"')
        self._model = model
        self._base_url = base_url.rstrip("/")
        self._api_key = SecretStr(api_key) if isinstance(api_key, str) else api_key
        self._prefill = prefill

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._model!r}, base_url={self._base_url!r})"

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
        key = self._key()
        digest = blake2b(key.encode(), digest_size=8).hexdigest() if key else None
        return (*self._identity, digest)

    @property
    def _identity(self) -> tuple[str, str, str]:
        return self.vendor, self._base_url, self._model

    def stream(
        self,
        messages: Sequence[BaseMessage],
        *,
        config: RunnableConfig,
        prefix: SharedPrefix | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[Delta, None]:
        """Sends one request and yields the completion of ``messages`` as it arrives.

        Args:
            messages: The conversation.
            config: Callbacks, tags and name of the run.
            prefix: The part of the last user message that other requests share, to be cached.
            **kwargs: Fields of the request: ``stop``, ``temperature``, ``max_tokens``, ``extra_body``.

        Raises:
            ProviderError: No API key, no connection, or the server returns an error or disconnects.
        """
        if nobody_listens(config):
            return self._deltas(messages, kwargs, prefix)
        return self._announced(messages, config, kwargs, prefix)

    @abstractmethod
    def _deltas(
        self, messages: Sequence[BaseMessage], parameters: dict[str, Any], prefix: SharedPrefix | None
    ) -> AsyncGenerator[Delta, None]:
        """Sends the request and reads the reply."""

    @abstractmethod
    def _key(self) -> str | None:
        """The API key, if there is one."""

    async def _announced(
        self,
        messages: Sequence[BaseMessage],
        config: RunnableConfig,
        parameters: dict[str, Any],
        prefix: SharedPrefix | None,
    ) -> AsyncGenerator[Delta, None]:
        async with (
            chat_run(config, messages, model=self._model, parameters=parameters) as run,
            aclosing(self._deltas(messages, parameters, prefix)) as deltas,
        ):
            pieces: list[str] = []
            usage: UsageMetadata | None = None
            metadata: dict[str, Any] = {"model_name": self._model}
            async for delta in deltas:
                if delta.text:
                    pieces.append(delta.text)
                    if run:
                        await run.wrote(delta.text)
                usage = delta.usage or usage
                metadata |= delta.response_metadata or {}
                if delta.finish_reason:
                    metadata["finish_reason"] = delta.finish_reason
                yield delta
            if run:
                run.message = AIMessage(
                    content="".join(pieces), usage_metadata=usage, response_metadata=metadata
                )


class SdkProvider(VendorProvider):
    """Streams completions with a vendor's SDK.

    Args:
        model: The model's name, as the server knows it.
        base_url: By default the URL in the environment, or else the vendor's own.
        api_key: By default the one in the environment.
        prefill: See :class:`VendorProvider`.
        client_options: Passed to the SDK's client.
    """

    url_variable: ClassVar[str]
    key_variable: ClassVar[str]
    sdk: ClassVar[Any]  # its module
    client_class: ClassVar[Any]

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None,
        api_key: str | SecretStr | None,
        prefill: bool | None,
        client_options: dict[str, Any],
    ) -> None:
        base_url = base_url or os.environ.get(self.url_variable) or self.vendor_url
        super().__init__(model, base_url=base_url, api_key=api_key, prefill=prefill)
        self._client_options = {"max_retries": 0, **client_options}
        self.tells_when_sent = "http_client" not in client_options

    async def _deltas(
        self, messages: Sequence[BaseMessage], parameters: dict[str, Any], prefix: SharedPrefix | None
    ) -> AsyncGenerator[Delta, None]:
        client = await self._client()
        read = self._reader()
        is_finished = False
        # What reading may raise: the SDK's errors, the transport's own in mid-stream, and unreadable JSON.
        errors = (self.sdk.APIError, httpx2.HTTPError, json.JSONDecodeError, UnicodeDecodeError)
        try:
            response = await self._send(client, messages, parameters, prefix)
            async with response:  # closes the request however this ends
                yield Delta(rate_limits=rate_limits_of(response.response.headers))
                async for event in response:
                    if delta := read(event):
                        is_finished = is_finished or delta.finish_reason is not None
                        yield delta
        except errors as error:
            prefilled = bool(messages) and messages[-1].type == "ai"
            raise self._explained(error, prefilled=prefilled) from error
        if not is_finished:
            raise self._broke_off("the stream ended without a finish reason")

    @abstractmethod
    async def _send(
        self,
        client: Any,
        messages: Sequence[BaseMessage],
        parameters: dict[str, Any],
        prefix: SharedPrefix | None,
    ) -> Any:
        """Sends the request with the SDK's ``client``; returns the SDK's stream."""

    @abstractmethod
    def _reader(self) -> Callable[[Any], Delta | None]:
        """Reads the events of one reply."""

    async def _client(self) -> Any:
        if (key := self._key()) is None:
            raise ProviderError(
                f"there is no API key for {self._base_url}: pass api_key=... or set {self.key_variable}; "
                "for a server of your own pass base_url=...",
                is_unbilled=True,
            )

        def make() -> Any:
            options = dict(self._client_options)
            if self.tells_when_sent:
                options["http_client"] = self.sdk.DefaultAsyncHttpxClient(**_TRANSPORT)
            return self.client_class(base_url=self._base_url, api_key=key, **options)

        settings = self.vendor, self._base_url, key, repr(sorted(self._client_options.items()))
        return await client_of(settings, make)

    def _key(self) -> str | None:
        # Servers of one's own mostly want none, and are sent a placeholder.
        if self._api_key is not None:
            return self._api_key.get_secret_value()
        return os.environ.get(self.key_variable) or ("not-needed" if self.is_elsewhere else None)

    def _broke_off(self, said: str) -> ProviderError:
        return ProviderError(f"{self._base_url} broke off its answer: {said}", is_retryable=True)

    def _explained(self, error: Any, *, prefilled: bool) -> ProviderError:
        if isinstance(error, self.sdk.APITimeoutError):
            return ProviderError(
                f"{self._base_url} did not answer in time; raise timeout=... or check its load",
                is_retryable=True,
            )
        if isinstance(error, self.sdk.APIConnectionError):
            return ProviderError(
                f"no connection to {self._base_url} ({error.__cause__ or error}); check that the server is "
                "running and that base_url is its address",
                is_retryable=True,
                is_unbilled=isinstance(error.__cause__, httpx2.ConnectError | httpx2.ConnectTimeout),
            )
        if isinstance(error, self.sdk.APIStatusError):
            said = one_line(error.body, error.message)
            return self._status_error(
                self._status_of(error), said, error.response.headers, prefilled=prefilled
            )
        if isinstance(error, self.sdk.APIError):
            return self._broke_off(one_line(error.body, error.message))
        return self._broke_off(f"{type(error).__name__}: {error}"[:300])

    def _status_of(self, error: Any) -> int:
        """The status of an ``APIStatusError``."""
        return int(error.status_code)

    def _status_error(
        self, status: int, said: str, headers: Mapping[str, str], *, prefilled: bool
    ) -> ProviderError:
        """The error for a reply with an error ``status``. Remembers a refused prefill."""
        if status == 400 and prefilled and _PREFILL_REFUSED.search(said):
            _without_prefill.add(self._identity)
            return PrefillRefusedError(
                f"model {self._model!r} at {self._base_url} does not continue a prefilled reply: {said}",
                status=status,
            )
        if status in (401, 403):
            problem = f"{self._base_url} refuses the API key ({status}): {said}"
        elif status in (400, 404, 422):
            problem = (
                f"{self._base_url} refuses the request for model {self._model!r} ({status}): {said}; "
                "check the model's name and the request's parameters"
            )
        elif status == 429:
            problem = f"the rate limit of {self._base_url} is exceeded (429): {said}; set limits=Limits(...)"
        else:
            problem = f"{self._base_url} answered with status {status}: {said}"
        return ProviderError(
            problem,
            is_retryable=(status in _RETRYABLE_STATUSES or status >= 500)
            and "insufficient_quota" not in said,
            was_refused=status in _REFUSED_STATUSES,
            status=status,
            retry_after_seconds=retry_after_seconds_of(headers),
            rate_limits=rate_limits_of(headers),
        )


def one_line(body: object, message: str) -> str:
    """The server's error message, shortened to one line, with its error code if the message lacks it."""
    said: object = body
    code = None
    if isinstance(body, dict):
        error = body.get("error")
        inner = error if isinstance(error, dict) else body
        said = inner.get("message") or inner.get("detail")
        code = inner.get("code")
    text = " ".join(str(said or message).split())[:300]
    return f"{text} ({code})" if isinstance(code, str) and code not in text else text


async def _watch(request: httpx2.Request) -> None:
    notice = on_sent.get()
    if notice is None:
        return

    async def trace(event: str, info: dict[str, Any]) -> None:
        # The request is written right after this event. The event that confirms it comes later, and never
        # if the task is cancelled in between.
        if event.endswith("send_request_body.started"):
            notice()

    request.extensions["trace"] = trace


# Common servers close a connection after 5 s of idleness, which is also how long httpx2 keeps one: a request
# sent at that moment is lost. So ours expire earlier.
_TRANSPORT: dict[str, Any] = {
    "event_hooks": {"request": [_watch]},
    "limits": httpx2.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=4.0),
}
