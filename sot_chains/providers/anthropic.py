"""Completions from the ``anthropic`` SDK. Importing this module imports the SDK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import anthropic
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from pydantic import SecretStr

from sot_chains.providers.base import SharedPrefix
from sot_chains.providers.replies import Piece, find_text, mapping
from sot_chains.providers.vendor import VendorProvider

_MAX_TOKENS = 4096  # the API requires a limit
_SAMPLING = ("temperature", "top_p", "top_k")


class AnthropicProvider(VendorProvider):
    """Streams completions from Anthropic's Messages API.

    Args:
        model: The model's name, as the server knows it.
        base_url: The URL of the server, without ``/v1``. By default the environment variable
            ``ANTHROPIC_BASE_URL``, or else Anthropic itself.
        api_key: By default the environment variable ``ANTHROPIC_API_KEY``, or else a placeholder for servers
            at another ``base_url``.
        prefill: Whether the model continues a final assistant message. By default it is tried once: newer
            models refuse it and get no prefill from then on.
        max_tokens: The longest a completion may be, unless a call sets it.
        **client_options: Passed to ``anthropic.AsyncAnthropic``.
    """

    vendor: ClassVar[str] = "anthropic"
    vendor_url: ClassVar[str] = "https://api.anthropic.com"
    url_variable: ClassVar[str] = "ANTHROPIC_BASE_URL"
    key_variable: ClassVar[str] = "ANTHROPIC_API_KEY"
    sdk: ClassVar[Any] = anthropic
    client_class: ClassVar[Any] = anthropic.AsyncAnthropic

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | SecretStr | None = None,
        prefill: bool | None = None,
        max_tokens: int = _MAX_TOKENS,
        **client_options: Any,
    ) -> None:
        super().__init__(
            model, base_url=base_url, api_key=api_key, prefill=prefill, client_options=client_options
        )
        self._max_tokens = max_tokens

    def _request(
        self, messages: Sequence[BaseMessage], parameters: dict[str, Any], prefix: SharedPrefix | None
    ) -> dict[str, Any]:
        return {
            "model": self._model,
            "max_tokens": self._max_tokens,
            "stream": True,
            **make_request(_without_trailing_blanks(messages), prefix),
            **_fields(parameters),
        }

    async def _send(self, client: anthropic.AsyncAnthropic, request: dict[str, Any]) -> Any:
        return await client.messages.create(**request)

    def _parse(self, payload: Mapping[str, Any]) -> Piece:
        """Reads an event. Input tokens come first, output tokens last; gateways repeat both."""
        delta = mapping(payload.get("delta"))
        match payload.get("type"):
            case "message_start":
                return _parse_message(mapping(payload.get("message")))
            case "content_block_start":
                block = mapping(payload.get("content_block"))
                return Piece(find_text([block]), find_text(block.get("thinking")))
            case "content_block_delta":
                return Piece(find_text(delta.get("text")), find_text(delta.get("thinking")))
            case "message_delta":
                return Piece(finish_reason=delta.get("stop_reason"), counts=(payload.get("usage"),))
            case "message_stop":
                return Piece(is_over=True)
            case "message":
                piece = _parse_message(payload)
                piece.text = find_text(payload.get("content"))
                return piece
        return Piece()

    def _usage(self, counts: Mapping[str, int]) -> UsageMetadata | None:
        """The tokens in LangChain's format, whose input tokens include cache reads and cache writes."""
        read, written = (counts.get(f"cache_{name}_input_tokens", 0) for name in ("read", "creation"))
        num_in, num_out = counts.get("input_tokens", 0) + read + written, counts.get("output_tokens", 0)
        if not num_in and not num_out:
            return None
        usage = UsageMetadata(input_tokens=num_in, output_tokens=num_out, total_tokens=num_in + num_out)
        if read or written:
            usage["input_token_details"] = InputTokenDetails(cache_read=read, cache_creation=written)
        return usage


def _parse_message(message: Mapping[str, Any]) -> Piece:
    return Piece(
        model=message.get("model"),
        finish_reason=message.get("stop_reason"),
        counts=(message.get("usage"),),
    )


def _without_trailing_blanks(messages: Sequence[BaseMessage]) -> Sequence[BaseMessage]:
    """Strips the end of a prefilled reply, since the API refuses trailing whitespace."""
    last = messages[-1]
    if last.type == "ai" and isinstance(last.content, str) and last.content != last.content.rstrip():
        return [*messages[:-1], last.model_copy(update={"content": last.content.rstrip()})]
    return messages


def _fields(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters under the API's names; those the SDK no longer accepts go into ``extra_body``."""
    fields = dict(parameters)
    if stop := fields.pop("stop", None):
        fields["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    extra = {name: fields.pop(name) for name in _SAMPLING if name in fields}
    if extra:
        fields["extra_body"] = {**extra, **(fields.get("extra_body") or {})}
    return fields


_CACHE = {"type": "ephemeral"}
# Anthropic caches no prefix below 1024 tokens (4096 for some models); a mark on a shorter one is ignored,
# and cache writes cost a quarter more than plain input, so short prefixes are not marked.
_FEWEST_CACHED_CHARACTERS = 4096


def make_request(messages: Sequence[BaseMessage], prefix: SharedPrefix | None) -> dict[str, Any]:
    """The fields ``system`` and ``messages`` of a request, with the shared prefix marked for caching.

    Consecutive messages of one role are merged, since the API requires alternating roles.

    Raises:
        ValueError: A message has content that Anthropic's API does not support.
    """
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
    if prefix is not None:
        _mark(system, turns, prefix)
    return {**({"system": system} if system else {}), "messages": turns}


def _mark(system: list[dict[str, Any]], turns: list[dict[str, Any]], prefix: SharedPrefix) -> None:
    """Marks the end of the shared prefix, if the text up to it is long enough to be cached."""
    asked = next((turn for turn in reversed(turns) if turn["role"] == "user"), None)
    if asked is None or asked["content"][-1].get("type") != "text":
        return
    before = [*system, *(block for turn in turns[: turns.index(asked)] for block in turn["content"])]
    num_before = sum(len(block.get("text", "")) for block in before)
    # All stages share this part: the skeleton request, sent first, writes it to the cache for the points.
    if before and num_before >= _FEWEST_CACHED_CHARACTERS and before[-1].get("type") == "text":
        before[-1]["cache_control"] = _CACHE
    text = asked["content"][-1]["text"]
    shared, rest = text[: prefix.num_characters], text[prefix.num_characters :]
    if rest.strip() and shared.strip() and num_before + len(shared) >= _FEWEST_CACHED_CHARACTERS:
        asked["content"][-1:] = [
            {"type": "text", "text": shared, "cache_control": _CACHE},
            {"type": "text", "text": rest},
        ]


def _blocks(message: BaseMessage) -> list[dict[str, Any]]:
    if isinstance(message, ToolMessage):
        result: dict[str, Any] = {
            "type": "tool_result",
            "tool_use_id": message.tool_call_id,
            "content": str(message.text),
        }
        return [{**result, "is_error": True} if message.status == "error" else result]
    if isinstance(message.content, str):
        blocks: list[dict[str, Any]] = []
        if message.content:
            blocks.append({"type": "text", "text": message.content})
    else:
        blocks = [
            block
            for part in message.content_blocks
            if (block := _block(dict(part)))["type"] not in ("tool_call", "reasoning", "tool_use")
        ]
    if isinstance(message, AIMessage):
        blocks += [
            {"type": "tool_use", "id": call["id"], "name": call["name"], "input": call["args"]}
            for call in message.tool_calls
        ]
    return blocks


def _block(part: dict[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if kind == "text":
        return {"type": "text", "text": part["text"]}
    if kind in ("image", "file"):
        name = "image" if kind == "image" else "document"
        if "url" in part:
            return {"type": name, "source": {"type": "url", "url": part["url"]}}
        if "base64" in part:
            data = {"type": "base64", "media_type": part.get("mime_type"), "data": part["base64"]}
            return {"type": name, "source": data}
    if kind in ("tool_call", "reasoning"):  # tool calls are read from the message; reasoning is not sent
        return {"type": kind}
    if kind == "non_standard" and isinstance(part.get("value"), dict) and "type" in part["value"]:
        return dict(part["value"])
    raise ValueError(
        f"a message holds content of type {kind!r}, which Anthropic's API does not support; "
        "expected text, images, files, tool calls and their results"
    )
