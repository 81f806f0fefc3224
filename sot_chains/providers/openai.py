"""Completions straight from the ``openai`` SDK: OpenAI's API and every server that speaks its chat wire.

Leaving LangChain's chat model out saves its per-call machinery, which is most of the cost when hundreds of
points are written at once. Importing this module imports the SDK;
:func:`~sot_chains.providers.make_provider` does so when a model is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import openai
from langchain_core.messages import BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from pydantic import SecretStr

from sot_chains.providers.base import SharedPrefix
from sot_chains.providers.replies import Piece, find_text, items, mapping
from sot_chains.providers.vendor import VendorProvider


class OpenAIProvider(VendorProvider):
    """Streams completions over OpenAI's chat wire.

    Args:
        model: The model's name, as the server knows it.
        base_url: Where the server is, usually ending in ``/v1``. By default the environment variable
            ``OPENAI_BASE_URL``, and failing that OpenAI itself.
        api_key: By default the environment variable ``OPENAI_API_KEY``. Servers at another ``base_url``
            mostly want none; they are sent a placeholder.
        prefill: Whether the server continues a final assistant message, which is asked for by the fields that
            vLLM, SGLang and ``sot serve`` have for it. OpenAI's own does not.
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

    def _request(
        self, messages: Sequence[BaseMessage], parameters: dict[str, Any], prefix: SharedPrefix | None
    ) -> dict[str, Any]:
        request = {
            "model": self._model,
            "messages": convert_to_openai_messages(list(messages)),
            "stream": True,
            **self._request_options,
            # Other servers may refuse a field they do not know.
            **({"prompt_cache_key": prefix.key} if prefix and not self.is_elsewhere else {}),
            **parameters,
        }
        extra: dict[str, Any] = {}
        if self.is_elsewhere and messages and messages[-1].type == "ai":
            extra = {"continue_final_message": True, "add_generation_prompt": False}
        if (min_tokens := request.pop("min_tokens", None)) and not self.has_refused_prefill:
            # vLLM's, too, which the SDK does not know; it refuses more than ``max_tokens``.
            extra["min_tokens"] = min(min_tokens, request.get("max_tokens") or min_tokens)
        if extra:
            request["extra_body"] = {**extra, **(request.get("extra_body") or {})}
        return request

    async def _send(self, client: openai.AsyncOpenAI, request: dict[str, Any]) -> Any:
        return await client.chat.completions.create(**request)

    def _parse(self, payload: Mapping[str, Any]) -> Piece:
        piece = Piece(model=payload.get("model"), counts=(payload.get("usage"),))
        for choice in items(payload.get("choices")):
            piece.counts = (*piece.counts, choice.get("usage"))  # where Moonshot reports it
            if choice.get("index") not in (0, None):  # of n > 1 choices, one is the answer
                continue
            piece.finish_reason = choice.get("finish_reason")
            said = mapping(choice.get("delta") or choice.get("message"))
            piece.text += find_text(said.get("content")) or find_text(said.get("refusal"))
            # Not OpenAI's, but of most servers that run reasoning models.
            piece.reasoning += find_text(said.get("reasoning_content")) or find_text(said.get("reasoning"))
        return piece

    def _usage(self, counts: Mapping[str, int]) -> UsageMetadata | None:
        num_in, num_out = counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0)
        if not num_in and not num_out:
            return None
        total = max(counts.get("total_tokens", 0), num_in + num_out)
        usage = UsageMetadata(input_tokens=num_in, output_tokens=num_out, total_tokens=total)
        if "cached_tokens" in counts:
            usage["input_token_details"] = InputTokenDetails(cache_read=counts["cached_tokens"])
        if "reasoning_tokens" in counts:
            usage["output_token_details"] = OutputTokenDetails(reasoning=counts["reasoning_tokens"])
        return usage
