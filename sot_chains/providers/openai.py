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

from sot_chains.providers.base import Delta, warn_once
from sot_chains.providers.replies import Reply, find_text, items, mapping
from sot_chains.providers.vendor import VendorProvider


class OpenAIProvider(VendorProvider):
    """Streams completions over OpenAI's chat wire.

    Args:
        prefill: Whether the server continues a final assistant message, which is asked for by the fields that
            vLLM, SGLang and ``sot serve`` have for it. OpenAI's own does not.
        stream_usage: Whether to ask for token counts. A server that ignores the wish is fine; switch it
            off for one that refuses it.
        **options: Those of :class:`~sot_chains.providers.vendor.VendorProvider`; ``base_url`` usually ends in
            ``/v1``.
    """

    vendor: ClassVar[str] = "openai"
    vendor_url: ClassVar[str] = "https://api.openai.com/v1"
    sdk: ClassVar[Any] = openai
    endpoint: ClassVar[str] = "chat.completions"

    def __init__(
        self, model: str, *, prefill: bool = False, stream_usage: bool = True, **options: Any
    ) -> None:
        super().__init__(model, prefill=prefill, **options)
        self._request_options = {"stream_options": {"include_usage": True}} if stream_usage else {}

    def _request(self, messages: Sequence[BaseMessage], parameters: dict[str, Any]) -> dict[str, Any]:
        request = {
            "model": self._model,
            "messages": _in_openais_form(messages),
            "stream": True,
            **self._request_options,
            **parameters,
        }
        if self.is_elsewhere and messages and messages[-1].type == "ai":
            request = {"continue_final_message": True, "add_generation_prompt": False, **request}
        if (min_tokens := request.pop("min_tokens", None)) and not self.has_refused_prefill:
            # vLLM's, which refuses more than ``max_tokens``.
            request["min_tokens"] = min(min_tokens, request.get("max_tokens") or min_tokens)
        return request

    def _parse(self, payload: Mapping[str, Any], reply: Reply) -> Delta:
        text = reasoning = ""
        finish_reason, counts = None, [payload.get("usage")]
        for choice in items(payload.get("choices")):
            counts.append(choice.get("usage"))  # where Moonshot reports it
            if choice.get("index") not in (0, None):  # of n > 1 choices, one is the answer
                continue
            finish_reason = choice.get("finish_reason")
            # Some servers repeat the whole message at the end of the stream.
            said = mapping(choice.get("delta") or (reply.is_empty and choice.get("message")))
            text += find_text(said.get("content")) or find_text(said.get("refusal"))
            # Not OpenAI's, but of most servers that run reasoning models.
            reasoning += find_text(said.get("reasoning_content")) or find_text(said.get("reasoning"))
        return reply.add(
            text,
            reasoning,
            model=payload.get("model"),
            finish_reason=finish_reason,
            counts=counts,
            tier=payload.get("service_tier"),
        )


_MARK = "prompt_cache_breakpoint"  # at the end of a part
_PARTS = {"assistant": ("text", "refusal"), "tool": ("text",), "system": ("text",)}  # of these roles' content


def _in_openais_form(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    try:
        converted = [one for message in messages for one in _converted(message)]
    except (AttributeError, KeyError) as error:  # such as a tool call in a system message
        raise ValueError(f"the messages are not in a form that OpenAI's API takes: {error}") from error
    for message in converted:
        role, content = message["role"], message["content"]
        if isinstance(content, str) or role not in _PARTS:
            continue
        message["content"] = [part for part in content if part.get("type") in _PARTS[role]] or ""
        for kind in {part.get("type") for part in content}.difference(_PARTS[role]):
            warn_once(f"OpenAI's API takes no {kind!r} in messages of the role {role!r}: it is left out")
    return converted


def _converted(message: BaseMessage) -> list[dict[str, Any]]:
    content = message.content if isinstance(message.content, list) else []
    given: list[Any] = [part for part in content if isinstance(part, str) or part.get("type") == "text"]
    is_marked = any(_MARK in part for part in given)
    converted = convert_to_openai_messages([message], text_format="block" if is_marked else "string")
    parts = [
        part for one in converted for part in one["content"] or () if is_marked and part["type"] == "text"
    ]
    for part, marked in zip(parts, given, strict=is_marked) if is_marked else ():
        if _MARK in marked:
            part[_MARK] = marked[_MARK]
    return converted
