"""LangChain's messages in the form Anthropic's API takes. Pure: knows no SDK and sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from sot_chains.providers.base import SharedPrefix

_CACHE = {"type": "ephemeral"}
# Anthropic caches no prefix below 1024 tokens (4096 for some models); a mark on a shorter one is ignored,
# and writing the cache costs a quarter more than reading plain text, so short ones are not marked.
_FEWEST_CACHED_CHARACTERS = 4096


def request_of(messages: Sequence[BaseMessage], prefix: SharedPrefix | None) -> dict[str, Any]:
    """The fields ``system`` and ``messages`` of a request, with the shared prefix marked to be cached.

    Neighbouring messages of one role are joined, as the API wants roles to alternate.

    Raises:
        ValueError: There is content Anthropic has no form for.
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
    """Marks where the shared part ends, if what precedes is long enough to be cached."""
    asked = next((turn for turn in reversed(turns) if turn["role"] == "user"), None)
    if asked is None or asked["content"][-1].get("type") != "text":
        return
    before = [*system, *(block for turn in turns[: turns.index(asked)] for block in turn["content"])]
    num_before = sum(len(block.get("text", "")) for block in before)
    # What all stages share: the skeleton's request, sent first, leaves it in the cache for the points.
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
    if kind in ("tool_call", "reasoning"):  # the first is read off the message itself, the second not sent
        return {"type": kind}
    if kind == "non_standard" and isinstance(part.get("value"), dict) and "type" in part["value"]:
        return dict(part["value"])
    raise ValueError(
        f"a message holds content of type {kind!r}, which Anthropic's API has no form for; "
        "expected text, images, files, tool calls and their results"
    )
