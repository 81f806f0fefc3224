"""Completions from the ``anthropic`` SDK. Importing this module imports the SDK."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import anthropic
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from sot_chains.providers.base import WORDS, Delta, warn_once
from sot_chains.providers.replies import Reply, find_text, mapping
from sot_chains.providers.vendor import VendorProvider

_MAX_TOKENS = 4096  # the API requires a limit


class AnthropicProvider(VendorProvider):
    """Streams completions from Anthropic's Messages API.

    Args:
        max_tokens: The longest a completion may be, unless a call sets it.
        **options: Those of :class:`~sot_chains.providers.vendor.VendorProvider`; ``base_url`` is without
            ``/v1``, and whether the model continues a final assistant message (``prefill``) is tried once by
            default: newer models refuse it.
    """

    vendor: ClassVar[str] = "anthropic"
    vendor_url: ClassVar[str] = "https://api.anthropic.com"
    sdk: ClassVar[Any] = anthropic
    endpoint: ClassVar[str] = "messages"

    def __init__(self, model: str, *, max_tokens: int = _MAX_TOKENS, **options: Any) -> None:
        super().__init__(model, **options)
        self._max_tokens = max_tokens

    def _request(self, messages: Sequence[BaseMessage], parameters: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self._model,
            "max_tokens": self._max_tokens,
            "stream": True,
            **make_request(messages),
            **_fields(parameters),
        }

    def _parse(self, payload: Mapping[str, Any], reply: Reply) -> Delta:
        """Reads an event. Input tokens come first, output tokens last; gateways repeat both."""
        match payload.get("type"):
            case "message_start" | "message":
                message = mapping(payload.get("message", payload))
                usage = mapping(message.get("usage"))
                delta = reply.add(
                    find_text(message.get("content")),
                    model=message.get("model"),
                    finish_reason=message.get("stop_reason"),
                    counts=(usage,),
                    tier=usage.get("speed"),
                )
                delta.usage = reply.take_usage()  # of the prompt, also if the rest does not come
                return delta
            case "content_block_start" | "content_block_delta":
                block = mapping(payload.get("content_block") or payload.get("delta"))
                return reply.add(find_text(block.get("text")), find_text(block.get("thinking")))
            case "message_delta":
                reason = mapping(payload.get("delta")).get("stop_reason")
                return reply.add(finish_reason=reason, counts=(payload.get("usage"),))
            case "message_stop":
                return reply.add(is_over=True)
        return Delta()


_OFF = WORDS["off"]  # values of parameters that change nothing


def _fields(parameters: dict[str, Any]) -> dict[str, Any]:
    if parameters.get("seed") is not None:  # a wish: nobody promises to answer alike
        warn_once("Anthropic's API takes no seed: it is left out")
    off = {name: not value for name, value in parameters.items() if name in _OFF["at_zero"]}
    off |= {name: parameters[name] == 1 for name in _OFF["at_one"] if name in parameters}
    fields = {name: value for name, value in parameters.items() if name != "seed" and not off.get(name)}
    if stop := fields.pop("stop", None):
        fields["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    return fields


def make_request(messages: Sequence[BaseMessage]) -> dict[str, Any]:
    """The fields ``system`` and ``messages`` of a request."""
    system = [block for m in messages if m.type == "system" for block in _blocks(m)]
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message.type == "system":
            continue
        role = "assistant" if isinstance(message, AIMessage) else "user"
        blocks = _blocks(message)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    if not turns:  # the API refuses a request without one
        system, turns = [], [{"role": "user", "content": system}]
    if turns[-1]["role"] == "assistant" and "text" in (last := turns[-1]["content"][-1]):
        last["text"] = last["text"].rstrip()  # of a prefilled reply, where the API refuses blanks at the end
    return {**({"system": system} if system else {}), "messages": turns}


# Kinds of content that only Anthropic's API has, and takes back as they are.
_OWN = re.compile("(redacted_)?thinking|.*tool_(use|result)|document|search_result|container_upload")


def _blocks(message: BaseMessage) -> list[dict[str, Any]]:
    content = message.content
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    blocks = list(filter(None, (_block(part, message) for part in parts)))
    if isinstance(message, AIMessage):
        for call in message.tool_calls:
            given = {"id": call["id"], "name": call["name"], "input": call["args"]}
            blocks.append({"type": "tool_use", **given})
    if not isinstance(message, ToolMessage):
        return blocks
    result = {"type": "tool_result", "tool_use_id": message.tool_call_id}
    failed = {"is_error": True} if message.status == "error" else {}
    return [{**result, "content": content if isinstance(content, str) else blocks, **failed}]


def _block(given: Any, message: BaseMessage) -> dict[str, Any] | None:
    """A part of a message in the API's form; ``None`` if the API takes no such part."""
    kind = given.get("type") if isinstance(given, dict) else "text"
    # Thinking without a signature is another model's.
    if _OWN.fullmatch(str(kind)) and (kind != "thinking" or given.get("signature")):
        return {name: value for name, value in given.items() if name != "index"}
    (part,) = HumanMessage([given]).content_blocks
    match part:
        # LangChain's standard knows refusals from langchain-core 1.8 on.
        case {"type": "text", "text": str(text)} | {"refusal": str(text)} | {"value": {"refusal": str(text)}}:
            mark = given.get("cache_control") if isinstance(given, dict) else None
            block = {"type": "text", "text": text, **({"cache_control": mark} if mark else {})}
            return block if text.strip() else None  # blank ones are refused
        case {"type": "image" | "file", "url": url}:
            source = {"type": "url", "url": url}
        case {"type": "image" | "file", "base64": data}:
            source = {"type": "base64", "media_type": part.get("mime_type"), "data": data}
        case {"value": {"type": kind}} | {"type": kind}:
            said = f"a message holds content of type {kind!r}, which Anthropic's API does not support"
            if not isinstance(message, AIMessage):
                raise ValueError(f"{said}; expected text, images, files, and results of tool calls")
            warn_once(f"{said}: it is left out")
            return None
    return {"type": "image" if part["type"] == "image" else "document", "source": source}
