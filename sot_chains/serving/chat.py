"""OpenAI's chat protocol: replies as they are written, whole or as server-sent events. Pure.

https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from langchain_core.messages import AIMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import ToolCallChunk

from sot_chains.providers.base import is_filtered, is_out_of_tokens
from sot_chains.serving.schema import RefusedError


def find_finish_reason(metadata: Mapping[str, Any], *, calls_tools: bool) -> str:
    """Why a reply ended, in OpenAI's words."""
    if calls_tools:
        return "tool_calls"
    trace = metadata.get("sot")
    if trace is None:
        reasons = [metadata.get("finish_reason") or metadata.get("stop_reason")]
    elif trace["plain_call"] is not None:
        reasons = [trace["plain_call"]["finish_reason"]]
    else:  # a point that was shortened to whole sentences is complete
        reasons = [point["finish_reason"] for point in trace["points"] if point["status"] == "cut"]
    if any(map(is_filtered, reasons)):
        return "content_filter"
    return "length" if any(map(is_out_of_tokens, reasons)) else "stop"


def make_tool_calls(message: AIMessage) -> list[dict[str, Any]]:
    """The tool calls of a message in OpenAI's format; the client may repair invalid ones."""
    calls = [(call, json.dumps(call["args"], ensure_ascii=False)) for call in message.tool_calls]
    calls += [(call, call["args"] or "") for call in message.invalid_tool_calls]  # type: ignore[misc]  # alike here
    return [
        {
            "id": call["id"] or f"call_{uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call["name"], "arguments": arguments},
        }
        for call, arguments in calls
    ]


def make_annotations(citations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Citations as OpenAI's annotations of a message, with the span in the document in addition."""
    annotations = []
    for citation in citations:
        metadata = citation["metadata"]
        source = metadata.get("source")
        title = metadata.get("title") or source or citation["document_id"] or citation["document"]
        span = {
            "start_index": citation["start"],
            "end_index": citation["end"],
            "title": str(title),
            "url": str(metadata.get("url") or source or f"#{citation['document']}"),
            "cited_text": citation["document_text"],
            **{name: citation[name] for name in ("document", "document_start", "document_end")},
        }
        annotations.append({"type": "url_citation", "url_citation": span})
    return annotations


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """What a client is told of a finished answer.

    Attributes:
        text: The whole text.
        calls: The tool calls, in OpenAI's format.
        annotations: See :func:`make_annotations`.
        finish_reason: In OpenAI's words.
        usage: Tokens of all model calls.
        fields: What is not OpenAI's.
    """

    text: str
    calls: Sequence[Mapping[str, Any]]
    annotations: Sequence[Mapping[str, Any]]
    finish_reason: str
    usage: UsageMetadata | None
    fields: Mapping[str, Any]


class Writer(Protocol):
    """Writes one reply in a client's format."""

    def begin(self, text: str) -> bytes:
        """The first events, with the first piece of the text."""

    def text(self, text: str) -> bytes:
        """An event with a piece of the text."""

    def calls(self, chunks: Sequence[ToolCallChunk]) -> bytes:
        """Events with pieces of tool calls."""

    def end(self, answer: FinishedAnswer) -> Iterator[bytes]:
        """The last events."""

    def failed(self, error: RefusedError) -> bytes:
        """An error in the middle of a stream."""

    def whole(self, answer: FinishedAnswer) -> dict[str, Any]:
        """The reply in one piece."""


class ChatWriter(Writer):
    """Writes one reply in the format of OpenAI's chats.

    Args:
        model: The name under which the client asked for the model.
        include_usage: Whether a stream ends with the token counts.
    """

    def __init__(self, model: str, *, include_usage: bool = False) -> None:
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        # Most events are pieces of text: what all of them share is encoded once.
        head = {**self._head, "object": "chat.completion.chunk"}
        self._before = f'data: {json.dumps(head)[:-1]}, "choices": [{{"index": 0, "delta": '
        self._after = ', "finish_reason": null}]}\n\n'

    def begin(self, text: str) -> bytes:
        """The event with the role, and the first piece of the text."""
        return self._delta({"role": "assistant", "content": text})

    def text(self, text: str) -> bytes:
        """An event with a piece of the text."""
        return self._delta({"content": text})

    def calls(self, chunks: Sequence[ToolCallChunk]) -> bytes:
        """An event with pieces of tool calls."""
        return self._delta({"tool_calls": [_call_delta(i, chunk) for i, chunk in enumerate(chunks)]})

    def end(self, answer: FinishedAnswer) -> Iterator[bytes]:
        """The last events."""
        if answer.annotations:
            yield self._delta({"annotations": answer.annotations})
        choice = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
        yield self._chunk(choices=[choice], **answer.fields)
        if self._include_usage:
            yield self._chunk(choices=[], usage=_make_usage(answer.usage))
        yield b"data: [DONE]\n\n"

    def failed(self, error: RefusedError) -> bytes:
        """An error in the middle of a stream."""
        return f"data: {json.dumps(error.body())}\n\n".encode()

    def whole(self, answer: FinishedAnswer) -> dict[str, Any]:
        """The reply in one piece."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        message["annotations"] = answer.annotations
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": answer.calls}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": [choice], "usage": _make_usage(answer.usage), **answer.fields}

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return f"{self._before}{json.dumps(delta)}{self._after}".encode()

    def _chunk(self, **fields: Any) -> bytes:
        chunk = {**self._head, "object": "chat.completion.chunk", **fields}
        return f"data: {json.dumps(chunk)}\n\n".encode()


def _call_delta(position: int, chunk: ToolCallChunk) -> dict[str, Any]:
    delta: dict[str, Any] = {"index": position if chunk["index"] is None else chunk["index"]}
    if chunk["id"]:
        delta |= {"id": chunk["id"], "type": "function"}
    function = {"name": chunk["name"], "arguments": chunk["args"] or ""}
    return {**delta, "function": {k: v for k, v in function.items() if v is not None}}


def _make_usage(usage: UsageMetadata | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    read, written = usage.get("input_token_details", {}), usage.get("output_token_details", {})
    return {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": read.get("cache_read") or 0},
        "completion_tokens_details": {"reasoning_tokens": written.get("reasoning") or 0},
    }
