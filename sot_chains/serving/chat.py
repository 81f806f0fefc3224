"""OpenAI's chat protocol: replies as they are written, whole or as server-sent events.

https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from sot_chains.serving.answer import Answer, ToolCall, usage_fields
from sot_chains.serving.schema import ChatRequest
from sot_chains.serving.stream import Writer, make_event


class ChatWriter(Writer):
    """Writes the reply to ``asked`` in the format of OpenAI's chats."""

    def __init__(self, asked: ChatRequest) -> None:
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": asked.model}
        self._include_usage = asked.stream_options is not None and asked.stream_options.include_usage

    def begin(self) -> bytes:
        """The first event, with the role."""
        return self._delta(role="assistant", content="")

    def text(self, text: str) -> bytes:
        """An event with a piece of the text."""
        return self._delta(content=text)

    def arguments(self, call: ToolCall, piece: str) -> bytes:
        """An event with a piece of the arguments of a tool call."""
        told = _make_call(call, piece, is_new=call.num_told == len(piece))
        return self._delta(tool_calls=[{"index": call.position, **told}])

    def annotation(self, number: int, annotation: dict[str, Any]) -> bytes:
        """An event with a citation; OpenAI's client joins lists by ``index``."""
        return self._delta(annotations=[{"index": number, **annotation}])

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The last events."""
        choice = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
        yield self._chunk(choices=[choice], **answer.extra_fields)
        if self._include_usage:
            yield self._chunk(choices=[], usage=usage_fields(answer.usage, "prompt", "completion"))
        yield b"data: [DONE]\n\n"

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The reply in one piece."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            calls = [_make_call(call, call.arguments) for call in answer.calls]
            message |= {"content": answer.text or None, "tool_calls": calls}
        message["annotations"] = answer.annotations
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        usage = usage_fields(answer.usage, "prompt", "completion")
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": [choice], "usage": usage, **answer.extra_fields}

    def _delta(self, **delta: Any) -> bytes:
        return self._chunk(choices=[{"index": 0, "delta": delta, "finish_reason": None}])

    def _chunk(self, **fields: Any) -> bytes:
        return make_event({**self._head, "object": "chat.completion.chunk", **fields})


def _make_call(call: ToolCall, arguments: str, *, is_new: bool = True) -> dict[str, Any]:
    if not is_new:
        return {"function": {"arguments": arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
