"""Completions through a vendor's SDK, which sends the requests; the replies are read here.

The SDKs are generated alike: their clients and errors have the same names. Knows no vendor's requests.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import httpx2
from langchain_core.messages import BaseMessage
from pydantic import SecretStr

from sot_chains.providers.base import Delta, ProviderError, SharedPrefix, is_out_of_tokens
from sot_chains.providers.errors import (
    ReportedError,
    error_in,
    payload_of,
    without_answer,
    words_of,
)
from sot_chains.providers.http import client_of, rate_limits_of
from sot_chains.providers.reading import Reading
from sot_chains.providers.sse import BrokenStreamError, EventStream, ServerEvent
from sot_chains.providers.vendor import VendorProvider, on_sent


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

    def __getstate__(self) -> dict[str, Any]:
        if not self.tells_when_sent:
            raise TypeError(
                "a model with http_client=... cannot be pickled, since the client belongs to this process; "
                "leave http_client out, and pass timeout=... or default_headers=... instead"
            )
        return self.__dict__

    async def _deltas(
        self, messages: Sequence[BaseMessage], parameters: dict[str, Any], prefix: SharedPrefix | None
    ) -> AsyncGenerator[Delta, None]:
        client = await self._client()
        reading = self._reading()
        headers: Mapping[str, str] = {}
        # What sending and reading may raise besides: an event that is no JSON or no text.
        errors = (
            *(self.sdk.APIError, BrokenStreamError, ReportedError),
            *(json.JSONDecodeError, UnicodeDecodeError),
        )
        try:
            sent = await self._send(client, messages, parameters, prefix)
            async with sent:  # closes the request however this ends
                headers = sent.response.headers
                yield Delta(rate_limits=rate_limits_of(headers))
                # The SDK's own reading drops the end of the stream, and what stands in its place.
                stream = EventStream(sent.response.aiter_bytes())
                async with aclosing(stream.events()) as events:
                    async for event in events:
                        if delta := _read(event, reading):
                            yield delta
                        if reading.is_over:
                            await stream.drain()
                            break
                if not reading.is_whole and stream.stray_text:
                    yield _read_in_one_piece(stream.stray_text, reading)
        except errors as error:
            prefilled = bool(messages) and messages[-1].type == "ai"
            raise self._explained(error, headers, prefilled=prefilled) from error
        if not reading.is_whole:
            raise self._broke_off("the stream ended without a finish reason")
        last = reading.last_delta()
        yield last
        if not reading.has_text and (reading.has_reasoning or is_out_of_tokens(last.finish_reason)):
            num_tokens = last.usage["output_tokens"] if last.usage else None
            raise without_answer(self._model, last.finish_reason, num_tokens)

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
    def _reading(self) -> Reading:
        """Reads one reply."""

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

    def _explained(self, error: Any, headers: Mapping[str, str], *, prefilled: bool) -> ProviderError:
        if isinstance(error, self.sdk.APITimeoutError) or getattr(error, "is_timeout", False):
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
            said = words_of(error.body, error.message)
            return self._status_error(error.status_code, said, error.response.headers, prefilled=prefilled)
        if isinstance(error, ReportedError):
            said = words_of(error.said)
            if error.status is not None:
                return self._status_error(error.status, said, headers, prefilled=prefilled)
            if error.is_in_place:
                return ProviderError(
                    f"{self._base_url} answered with something else in place of a stream: {said}; check "
                    "that base_url is the address of its API",
                    is_unbilled=True,
                )
            return self._broke_off(said)
        return self._broke_off(f"{type(error).__name__}: {error}"[:300])


def _read(event: ServerEvent, reading: Reading) -> Delta | None:
    """What an event adds to the reply.

    Raises:
        ReportedError: It is an error.
        JSONDecodeError: It is not JSON.
    """
    data = event.data.strip()
    if data.startswith("[DONE]"):
        reading.is_over = True
    if reading.is_over or not data or event.name == "ping":
        return None
    payload = payload_of(data) if event.name == "error" else json.loads(data)
    if (said := error_in(event.name, payload)) is not None:
        raise ReportedError(said)
    return reading.read(payload) if isinstance(payload, Mapping) else None


def _read_in_one_piece(body: str, reading: Reading) -> Delta:
    """The reply of a server that does not stream.

    Raises:
        ReportedError: It is something else.
        JSONDecodeError: It breaks off.
    """
    payload = json.loads(body) if body.startswith(("{", "[")) else body
    if (said := error_in("", payload)) is not None:
        raise ReportedError(said, is_in_place=reading.is_empty)
    delta = reading.read(payload) if isinstance(payload, Mapping) else None
    if not reading.is_whole:
        raise ReportedError(payload, is_in_place=reading.is_empty)
    return delta or Delta()


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
