"""Messages as the turns of a chat template, also those that other models and their tools have written.

Knows LangChain's messages and the content blocks of providers. Does not know tokenizers.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from langchain_core.messages import AIMessage, ToolMessage, convert_to_messages
from langchain_core.messages.utils import MessageLikeRepresentation

_ROLES = {"human": "user", "ai": "assistant", "function": "tool"}
_REASONING_KINDS = ("reasoning", "thinking")
_CALL_KINDS = ("tool_use", "function_call", "tool_call", "invalid_tool_call")
# What holds the text of a block, or blocks within it.
_TEXT_KEYS = ("text", "refusal", *_REASONING_KINDS, "summary", "content", "source")


def make_turns(messages: Iterable[MessageLikeRepresentation]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them.

    Reasoning is the turn's ``reasoning_content``. Arguments of calls are objects, results have their tool's
    name, and identifiers have the nine letters and digits that Mistral's templates insist on. What replies
    and results hold besides text is left out with a warning.

    Raises:
        ValueError: There is no message, or a question holds something other than text.
    """
    names: dict[str, str] = {}  # of the tools called, by the call's identifier
    turns = []
    for message in convert_to_messages([*map(_with_calls_as_they_are, messages)]):
        role = getattr(message, "role", None) or _ROLES.get(message.type, message.type)
        texts, thoughts = _read(role, message.content)
        # Providers cut a reply into blocks, e.g. where a citation begins.
        turn = {"role": role, "content": ("" if role == "assistant" else "\n").join(texts)}
        if message.name:
            turn["name"] = message.name
        if isinstance(message, AIMessage):
            more = message.additional_kwargs
            turn["content"] = turn["content"] or more.get("refusal") or ""
            if reasoning := "".join(thoughts) or more.get("reasoning_content") or more.get("reasoning"):
                turn["reasoning_content"] = str(reasoning)
            if calls := [*_find_calls(message)]:
                turn["tool_calls"] = calls
                names |= {call["id"]: call["function"]["name"] for call in calls}
        if isinstance(message, ToolMessage):
            turn["tool_call_id"] = _short(message.tool_call_id)
            turn.setdefault("name", names.get(turn["tool_call_id"], ""))
        turns.append(turn)
    if not turns:
        raise ValueError("there is no message to answer: give at least one")
    return turns


def _read(role: str, content: str | list[str | dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The texts of a message, and its reasoning."""
    texts: list[str] = []
    thoughts: list[str] = []
    for block in [content] if isinstance(content, str) else content:
        kind = "text" if isinstance(block, str) else str(block.get("type") or next(iter(block), None))
        if (text := _find_text(block)) is not None:
            (thoughts if kind in _REASONING_KINDS else texts).append(text)
        elif kind not in _CALL_KINDS:
            said = f"a local model reads text only, but the {role} message holds {kind!r}"
            if role not in ("assistant", "tool"):
                raise ValueError(said)
            warnings.warn(f"{said}, which is left out", stacklevel=4)
    return texts, thoughts


def _with_calls_as_they_are(message: MessageLikeRepresentation) -> MessageLikeRepresentation:
    """OpenAI's message in a form of which LangChain keeps broken calls beside the others."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not calls or not all("function" in call for call in calls):
        return message
    return {**message, "tool_calls": None, "additional_kwargs": {"tool_calls": calls}}


def _find_text(block: Any) -> str | None:
    """The text in a content block of any provider; ``None`` if there is none."""
    if block is None or isinstance(block, str):
        return block
    if isinstance(block, list):
        found = [text for part in block if (text := _find_text(part)) is not None]
        return "\n".join(found) if found else None
    if block.get("type") == "text" and "data" in block:  # the source of Anthropic's documents
        return str(block["data"])
    inner = (block[key] for key in _TEXT_KEYS if isinstance(block.get(key), str | list | dict))
    return next((text for part in inner if (text := _find_text(part)) is not None), None)


def _find_calls(message: AIMessage) -> Iterator[dict[str, Any]]:
    """The calls of a reply, whole or broken, in OpenAI's format but for the arguments."""
    blocks = [block for block in message.content if isinstance(block, dict)]
    known = set()
    for call in (*message.tool_calls, *message.invalid_tool_calls, *blocks):
        identifier = call.get("call_id") or call.get("id")
        if call.get("type") not in _CALL_KINDS or (identifier is not None and identifier in known):
            continue
        known.add(identifier)
        given: Any = next((call[key] for key in ("args", "input", "arguments") if call.get(key)), {})
        arguments, name = given, call.get("name") or ""
        if isinstance(given, str):
            with suppress(json.JSONDecodeError):
                arguments = json.loads(given)
        if not isinstance(arguments, dict):
            said = f"arguments of a call to {name!r} are no JSON object and are left out: {given!r:.200}"
            warnings.warn(said, stacklevel=3)
            arguments = {}
        function = {"name": name, "arguments": arguments}
        yield {"type": "function", "id": _short(identifier), "function": function}


def _short(identifier: str | None) -> str:
    return hashlib.sha256(str(identifier).encode("utf-8", "replace")).hexdigest()[:9]
