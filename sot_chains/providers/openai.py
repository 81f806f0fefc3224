"""Completions straight from the ``openai`` SDK: OpenAI's API and every server that speaks its chat wire.

Leaving LangChain's chat model out saves its per-call machinery, which is most of the cost when hundreds of
points are written at once. Callbacks still see a chat model run (:mod:`sot_chains.runs`). Importing this
module imports the SDK; :func:`~sot_chains.providers.provider_of` does so when a model is named.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import openai
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.runnables import RunnableConfig
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk
from pydantic import SecretStr

from sot_chains.providers.base import Delta, ProviderError
from sot_chains.providers.clients import ClientsByLoop
from sot_chains.runs import chat_run

_OPENAI = "https://api.openai.com/v1"
_clients: ClientsByLoop[openai.AsyncOpenAI] = ClientsByLoop()


class OpenAIProvider:
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
        **client_options: Passed to ``openai.AsyncOpenAI``: ``timeout`` (seconds), ``max_retries``, and so on.
    """

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
        if not model:
            raise ValueError('the model has no name; write "openai:MODEL", such as "openai:gpt-4.1-mini"')
        self._model = model
        self._prefill = prefill
        self._base_url = base_url or os.environ.get("OPENAI_BASE_URL") or _OPENAI
        self._api_key = SecretStr(api_key) if isinstance(api_key, str) else api_key
        self._request_options = {"stream_options": {"include_usage": True}} if stream_usage else {}
        self._client_options = client_options

    def __repr__(self) -> str:
        return f"OpenAIProvider({self._model!r}, base_url={self._base_url!r})"

    @property
    def supports_prefill(self) -> bool:
        """Whether the server was said to continue a final assistant message."""
        return self._prefill

    @property
    def model_name(self) -> str:
        """The model's name, as the server knows it."""
        return self._model

    async def stream(
        self, messages: Sequence[BaseMessage], *, config: RunnableConfig, **kwargs: Any
    ) -> AsyncGenerator[Delta, None]:
        """Yields the completion of ``messages`` as the server writes it.

        Args:
            messages: The conversation.
            config: Who is told of the call.
            **kwargs: Fields of the request: ``stop``, ``temperature``, ``max_tokens``, ``extra_body``.

        Raises:
            ProviderError: No key, no server, or a server that refuses.
        """
        async with chat_run(config, messages, model=self._model, parameters=kwargs) as run:
            usage: UsageMetadata | None = None
            finish_reason: str | None = None
            model_name = self._model
            pieces: list[str] = []
            async with aclosing(self._chunks(messages, kwargs)) as chunks:
                async for chunk in chunks:
                    delta = _delta(chunk)
                    if delta.text:
                        pieces.append(delta.text)
                        if run:
                            await run.wrote(delta.text)
                    usage = delta.usage or usage
                    finish_reason = delta.finish_reason or finish_reason
                    model_name = chunk.model or model_name
                    yield delta
            if run:
                run.message = AIMessage(
                    content="".join(pieces),
                    usage_metadata=usage,
                    response_metadata={"model_name": model_name, "finish_reason": finish_reason},
                )

    async def _chunks(
        self, messages: Sequence[BaseMessage], kwargs: dict[str, Any]
    ) -> AsyncGenerator[ChatCompletionChunk, None]:
        client = await self._client()
        try:
            response: openai.AsyncStream[ChatCompletionChunk] = await client.chat.completions.create(
                **{
                    "model": self._model,
                    "messages": convert_to_openai_messages(list(messages)),
                    "stream": True,
                    **self._request_options,
                    **kwargs,
                }
            )
            async with response:  # closes the request however this ends
                async for chunk in response:
                    yield chunk
        except openai.APIError as error:
            raise self._explained(error) from error

    async def _client(self) -> openai.AsyncOpenAI:
        if (key := self._key()) is None:
            raise ProviderError(
                f"there is no API key for {self._base_url}: pass api_key=... or set OPENAI_API_KEY; "
                "for a server of your own pass base_url=..."
            )
        return await _clients.get(
            (self._base_url, key, repr(sorted(self._client_options.items()))),
            lambda: openai.AsyncOpenAI(base_url=self._base_url, api_key=key, **self._client_options),
        )

    def _key(self) -> str | None:
        if self._api_key is not None:
            return self._api_key.get_secret_value()
        return os.environ.get("OPENAI_API_KEY") or (None if self._base_url == _OPENAI else "not-needed")

    def _explained(self, error: openai.APIError) -> ProviderError:
        match error:
            case openai.APITimeoutError():
                problem = f"{self._base_url} did not answer in time; raise timeout=... or check its load"
            case openai.APIConnectionError():
                problem = (
                    f"no connection to {self._base_url} ({error.__cause__ or error}); check that the server "
                    "is running and that base_url is its address, usually ending in /v1"
                )
            case openai.AuthenticationError() | openai.PermissionDeniedError():
                problem = f"{self._base_url} refuses the API key ({error.status_code}): {_words(error)}"
            case openai.NotFoundError() | openai.BadRequestError():
                problem = (
                    f"{self._base_url} refuses the request for model {self._model!r} ({error.status_code}): "
                    f"{_words(error)}; check the model's name and the request's parameters"
                )
            case openai.APIStatusError():
                problem = f"{self._base_url} answered with status {error.status_code}: {_words(error)}"
            case _:
                problem = f"{self._base_url} broke off its answer: {_words(error)}"
        return ProviderError(problem)


def _delta(chunk: ChatCompletionChunk) -> Delta:
    usage = _usage(chunk.usage) if chunk.usage else None
    if not chunk.choices:  # the chunk that carries usage has none
        return Delta(usage=usage)
    choice = chunk.choices[0]
    metadata = {"model_name": chunk.model} if choice.finish_reason and chunk.model else None
    return Delta(choice.delta.content or "", usage, choice.finish_reason, metadata)


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


def _words(error: openai.APIError) -> str:
    """What the server said, on one line and of readable length."""
    body = error.body
    said = body.get("message") or body.get("detail") if isinstance(body, dict) else body
    return " ".join(str(said or error.message).split())[:300]
