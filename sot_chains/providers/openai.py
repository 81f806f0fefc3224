"""Completions straight from the ``openai`` SDK: OpenAI's API and every server that speaks its chat wire.

Leaving LangChain's chat model out saves its per-call machinery, which is most of the cost when hundreds of
points are written at once. Importing this module imports the SDK;
:func:`~sot_chains.providers.provider_of` does so when a model is named.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

import httpx2
import openai
from langchain_core.messages import BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk
from pydantic import SecretStr

from sot_chains.providers.base import Delta, ProviderError, SharedPrefix
from sot_chains.providers.http import ClientsByLoop, rate_limits_of
from sot_chains.providers.vendor import TRANSPORT, VendorProvider, ends_with_reply, one_line

OPENAI_URL = "https://api.openai.com/v1"
_clients: ClientsByLoop[openai.AsyncOpenAI] = ClientsByLoop()


# What reading a reply may raise: the SDK's errors, the transport's own in mid-stream, and unreadable JSON.
READING_ERRORS = (openai.APIError, httpx2.HTTPError, json.JSONDecodeError, UnicodeDecodeError)


class OpenAIProvider(VendorProvider):
    """Streams completions over OpenAI's chat wire.

    Args:
        model: The model's name, as the server knows it.
        base_url: Where the server is, usually ending in ``/v1``. By default the environment variable
            ``OPENAI_BASE_URL``, and failing that OpenAI itself.
        api_key: By default the environment variable ``OPENAI_API_KEY``. Servers at another ``base_url``
            mostly want none; they are sent a placeholder.
        prefill: Whether the server continues a final assistant message. OpenAI's own does not.
        stream_usage: Whether to ask for token counts. A server that ignores the wish is fine; switch it
            off for one that refuses it.
        **client_options: Passed to ``openai.AsyncOpenAI``: ``timeout`` (seconds), ``default_headers``, and
            so on.
    """

    vendor: ClassVar[str] = "openai"
    vendor_url: ClassVar[str] = OPENAI_URL
    key_variable: ClassVar[str] = "OPENAI_API_KEY"
    _connect_errors: ClassVar[tuple[type[BaseException], ...]] = (httpx2.ConnectError, httpx2.ConnectTimeout)

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | SecretStr | None = None,
        prefill: bool = False,
        stream_usage: bool = True,
        **client_options: Any,
    ) -> None:
        super().__init__(
            model,
            base_url=base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL,
            api_key=api_key,
            prefill=prefill,
        )
        self._client_options = {"max_retries": 0, **client_options}
        self._request_options = {"stream_options": {"include_usage": True}} if stream_usage else {}
        self.tells_when_sent = "http_client" not in client_options

    @property
    def _is_openai(self) -> bool:
        return self._base_url == OPENAI_URL

    async def _client(self) -> openai.AsyncOpenAI:
        if (key := self._key()) is None:
            raise self._no_key()
        return await _clients.get(
            (self._base_url, key, repr(sorted(self._client_options.items()))),
            lambda: openai.AsyncOpenAI(base_url=self._base_url, api_key=key, **self._options()),
        )

    def _options(self) -> dict[str, Any]:
        if not self.tells_when_sent:
            return self._client_options
        return {
            "http_client": openai.DefaultAsyncHttpxClient(**TRANSPORT),
            **self._client_options,
        }

    def _key(self) -> str | None:
        if self._api_key is not None:
            return self._api_key.get_secret_value()
        return os.environ.get("OPENAI_API_KEY") or (None if self._is_openai else "not-needed")

    def _explained(self, error: Exception, *, prefilled: bool) -> ProviderError:
        match error:
            case openai.APITimeoutError():
                return self._timed_out()
            case openai.APIConnectionError():
                return self._unreachable(error)
            case openai.APIStatusError():
                said = one_line(error.body, error.message)
                return self._status_error(
                    error.status_code, said, error.response.headers, prefilled=prefilled
                )
            case openai.APIError():
                return self._broke_off(one_line(error.body, error.message))
            case _:
                return self._broke_off(f"{type(error).__name__}: {error}"[:300])

    async def _deltas(
        self, messages: Sequence[BaseMessage], parameters: dict[str, Any], prefix: SharedPrefix | None
    ) -> AsyncGenerator[Delta, None]:
        client = await self._client()
        request = {
            "model": self._model,
            "messages": convert_to_openai_messages(list(messages)),
            "stream": True,
            **self._request_options,
            # Other servers may refuse a field they do not know.
            **({"prompt_cache_key": prefix.key} if prefix and self._is_openai else {}),
            **parameters,
        }
        try:
            response: openai.AsyncStream[ChatCompletionChunk] = await client.chat.completions.create(
                **request
            )
            async with response:  # closes the request however this ends
                yield Delta(rate_limits=rate_limits_of(response.response.headers))
                is_finished = False
                async for chunk in response:
                    delta = _delta(chunk)
                    is_finished = is_finished or delta.finish_reason is not None
                    yield delta
        except READING_ERRORS as error:
            raise self._explained(error, prefilled=ends_with_reply(messages)) from error
        if not is_finished:
            raise self._ended_early()


def _delta(chunk: ChatCompletionChunk) -> Delta:
    usage = _usage(chunk.usage) if chunk.usage else None
    if not chunk.choices:  # the chunk that carries usage has none
        return Delta(usage=usage)
    choice = chunk.choices[0]
    if choice.delta is None:  # not by the wire's own rules, but seen
        return Delta(usage=usage, finish_reason=choice.finish_reason)
    metadata = {"model_name": chunk.model} if choice.finish_reason and chunk.model else None
    text = choice.delta.content or choice.delta.refusal or ""  # a refusal is what the model says, too
    extra = choice.delta.model_extra or {}  # not OpenAI's, but of most servers that run reasoning models
    reasoning = extra.get("reasoning_content") or extra.get("reasoning")
    thought = reasoning if isinstance(reasoning, str) else ""
    return Delta(text, usage, choice.finish_reason, metadata, reasoning=thought)


def _usage(usage: CompletionUsage) -> UsageMetadata:
    counted = UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )
    if (read := usage.prompt_tokens_details) and read.cached_tokens is not None:
        counted["input_token_details"] = InputTokenDetails(cache_read=read.cached_tokens)
    if (written := usage.completion_tokens_details) and written.reasoning_tokens is not None:
        counted["output_token_details"] = OutputTokenDetails(reasoning=written.reasoning_tokens)
    return counted
