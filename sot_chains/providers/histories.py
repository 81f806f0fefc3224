"""Tool calls of earlier turns and their results, in the one form that every API takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from sot_chains.providers.base import warn_once

_ID = re.compile(r"[\w-]{1,40}", re.ASCII)  # that both OpenAI and Anthropic take
_CALLS = ("tool_use", "tool_call", "function_call", "invalid_tool_call")  # as parts of a message
_NO_RESULT = "There is no result: the call was not carried out."


def with_results(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """``messages`` with one result right behind each tool call, as APIs insist."""
    paired: list[BaseMessage | None] = []
    waiting: dict[object, list[tuple[int, str]]] = {}  # where results go, and the identifier they get
    taken: set[str] = set()
    for message in messages:
        if isinstance(message, ToolMessage):
            if places := waiting.get(message.tool_call_id):
                place, call_id = places.pop(0)
                paired[place] = message.model_copy(update={"tool_call_id": call_id})
            else:
                warn_once("a tool result in the history belongs to no call before it: it is left out")
            continue
        paired.append(message)
        listed = message.content if isinstance(message.content, list) else ()
        parts = [part for part in listed if isinstance(part, dict)] if listed else []
        for part in parts:  # a result within a user's message, as Anthropic has it
            for place, _ in waiting.pop(part.get("tool_use_id"), ()):
                paired[place] = None
        if not isinstance(message, AIMessage) or not (calls := _find_calls(message, parts)):
            continue
        others = [one for one in message.content if one not in parts or one["type"] not in _CALLS]
        content = message.content if isinstance(message.content, str) else others
        update = {"content": content, "tool_calls": calls, "invalid_tool_calls": []}
        paired[-1] = message.model_copy(update=update)
        waiting |= {call["id"] or "": [] for call in calls}
        for call in calls:
            given = call["id"] or ""
            if given in taken or not _ID.fullmatch(given):
                call["id"] = f"call{len(paired):05}"
            taken.add(call["id"])
            waiting[given].append((len(paired), call["id"]))
            paired.append(ToolMessage(_NO_RESULT, tool_call_id=call["id"], status="error"))
    if taken and any(message and message.content == _NO_RESULT for message in paired):
        warn_once("a tool call in the history has no result: one that says so is sent")
    return list(filter(None, paired))


def _find_calls(message: AIMessage, parts: Sequence[dict[Any, Any]]) -> list[Any]:
    calls: list[Any] = [{**call} for call in message.tool_calls]
    for call in message.invalid_tool_calls:
        args = {"arguments": call["args"]} if call["args"] else {}
        calls.append({"type": "tool_call", "id": call["id"], "name": call["name"], "args": args})
    for part in parts if not calls else ():
        if part.get("type") == "tool_use":
            name, args = part.get("name"), part.get("input") or {}
            calls.append({"type": "tool_call", "id": part.get("id"), "name": name, "args": args})
    return calls
