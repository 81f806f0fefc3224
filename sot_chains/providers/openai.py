"""Completions straight from the ``openai`` SDK: OpenAI's API and every server that speaks its chat wire.

Leaving LangChain's chat model out saves its per-call machinery, which is most of the cost when hundreds of
points are written at once. Importing this module imports the SDK;
:func:`~sot_chains.providers.provider_of` does so when a model is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import openai
from langchain_core.messages import BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk
from pydantic import SecretStr

from sot_chains.providers.base import Delta, SharedPrefix
from sot_chains.providers.vendor import SdkProvider


class OpenAIProvider(SdkProvider):
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
    vendor_url: ClassVar[str] = "https://api.openai.com/v1"
    url_variable: ClassVar[str] = "OPENAI_BASE_URL"
    key_variable: ClassVar[str] = "OPENAI_API_KEY"
    sdk: ClassVar[Any] = openai
    client_class: ClassVar[Any] = openai.AsyncOpenAI

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
            model, base_url=base_url, api_key=api_key, prefill=prefill, client_options=client_options
        )
        self._request_options = {"stream_options": {"include_usage": True}} if stream_usage else {}

    async def _send(
        self,
        client: openai.AsyncOpenAI,
        messages: Sequence[BaseMessage],
        parameters: dict[str, Any],
        prefix: SharedPrefix | None,
    ) -> Any:
        request = {
            "model": self._model,
            "messages": convert_to_openai_messages(list(messages)),
            "stream": True,
            **self._request_options,
            # Other servers may refuse a field they do not know.
            **({"prompt_cache_key": prefix.key} if prefix and not self.is_elsewhere else {}),
            **parameters,
        }
        return await client.chat.completions.create(**request)

    def _reader(self) -> Callable[[ChatCompletionChunk], Delta]:
        return _delta


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
