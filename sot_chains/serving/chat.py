"""OpenAI's chat protocol: replies as they are written, whole or as server-sent events. Pure.

https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from langchain_core.messages.tool import ToolCallChunk

from sot_chains.serving.answer import Answer, usage_fields
from sot_chains.serving.schema import RefusedError


class ChatWriter:
    """Writes one reply in the format of OpenAI's chats, for the ``model`` that the client asked for."""

    def __init__(self, model: str, *, include_usage: bool = False) -> None:
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        # Most events are pieces of text: what all of them share is encoded once.
        head = {**self._head, "object": "chat.completion.chunk"}
        self._before = f'data: {json.dumps(head)[:-1]}, "choices": [{{"index": 0, "delta": '
        self._after = ', "finish_reason": null}]}\n\n'

    def begin(self, text: str) -> bytes:
        """The first event, with the role and the first piece of the text."""
        return self._delta({"role": "assistant", "content": text})

    def text(self, text: str) -> bytes:
        """An event with a piece of the text."""
        return self._delta({"content": text})

    def calls(self, chunks: Sequence[ToolCallChunk]) -> bytes:
        """An event with pieces of tool calls."""
        return self._delta({"tool_calls": [_call_delta(i, chunk) for i, chunk in enumerate(chunks)]})

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The last events."""
        if answer.annotations:
            yield self._delta({"annotations": answer.annotations})
        choice = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
        yield self._chunk(choices=[choice], **answer.extra_fields)
        if self._include_usage:
            yield self._chunk(choices=[], usage=usage_fields(answer.usage, "prompt", "completion"))
        yield b"data: [DONE]\n\n"

    def failed(self, error: RefusedError) -> bytes:
        """An error in the middle of a stream."""
        return f"data: {json.dumps(error.body())}\n\n".encode()

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The reply in one piece."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        message["annotations"] = answer.annotations
        if answer.tool_calls:
            message |= {"content": answer.text or None, "tool_calls": answer.tool_calls}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        ended = {
            "choices": [choice],
            "usage": usage_fields(answer.usage, "prompt", "completion"),
            **answer.extra_fields,
        }
        return {**self._head, "object": "chat.completion", **ended}

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
