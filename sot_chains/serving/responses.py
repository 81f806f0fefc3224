"""OpenAI's responses protocol, read as a request for a chat completion and written as its own events. Pure.

https://platform.openai.com/docs/api-reference/responses. Nothing is kept between two requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import ToolCallChunk
from pydantic import BaseModel, ConfigDict, Field

from sot_chains.serving.answer import Answer, usage_fields
from sot_chains.serving.schema import ChatRequest, RefusedError, read_body_as, read_request

# The client's bookkeeping, or options of what OpenAI keeps.
_IGNORED = ("store", "include", "truncation", "stream_options", "prompt_cache_retention")
_STATEFUL = ("previous_response_id", "conversation", "prompt", "background")


class _ResponsesRequest(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None


def read_responses_request(body: bytes) -> ChatRequest:
    """Reads the body of ``POST /v1/responses`` as a request for a chat completion, as ``read_request``."""
    asked = read_body_as(_ResponsesRequest, body)
    extra = {name: value for name, value in (asked.model_extra or {}).items() if name not in _IGNORED}
    for name in _STATEFUL:
        if extra.pop(name, None):
            raise RefusedError(f"{name}: this server keeps no state; send the whole conversation", param=name)
    if "messages" in extra:
        raise RefusedError("messages are sent as input in this protocol", param="messages")
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    messages = [message for item in items if (message := _read_item(item))]
    if asked.instructions:
        messages = [{"role": "system", "content": asked.instructions}, *messages]
    choice = asked.tool_choice
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    given: dict[str, Any] = {
        "max_completion_tokens": asked.max_output_tokens,
        "response_format": _read_format((asked.text or {}).get("format")),
        "reasoning_effort": (asked.reasoning or {}).get("effort"),
        "tools": [_read_tool(tool) for tool in asked.tools or ()] or None,
        "tool_choice": choice,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return read_request(json.dumps({**extra, "messages": messages, **given}).encode())


def _read_item(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """An item of the input as a chat message; ``None`` for the model's own reasoning."""
    match item.get("type", "message"):
        case "message":
            return {"role": item.get("role"), "content": _read_content(item.get("content"))}
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            content = _read_content(item.get("output"))
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        case "reasoning":
            return None
        case kind:
            raise RefusedError(f"input of type {str(kind)[:80]!r} is not supported", param="input")


def _read_content(content: Any) -> Any:
    """Content as a chat message has it; what is no content is left for :func:`read_request` to refuse."""
    return list(map(_read_part, content)) if isinstance(content, list) else content


def _read_part(part: Any) -> Any:
    match part:
        case {"type": "input_text" | "output_text"}:
            return {"type": "text", "text": part.get("text")}
        case {"type": "input_image", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
    return part


def _read_format(form: Any) -> dict[str, Any] | None:
    if not isinstance(form, Mapping) or form.get("type") == "text":
        return None
    if form.get("type") != "json_schema":
        return dict(form)
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _read_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RefusedError(f"tools of type {str(tool.get('type'))[:80]!r} are not supported", param="tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


class ResponseWriter:
    """Writes one reply in the format of OpenAI's responses, for the ``model`` that the client asked for."""

    def __init__(self, model: str) -> None:
        self._head = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }
        self._num_events = 0
        self._calls: dict[int, dict[str, Any]] = {}
        self._message_id = f"msg_{uuid4().hex}"
        self._part = {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def begin(self, text: str) -> bytes:
        """The first events, with the first piece of the text."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        message = {**self._message(_make_part("")), "status": "in_progress", "content": []}
        events = (
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=message),
            self._event("response.content_part.added", **self._part, part=_make_part("")),
        )
        return b"".join(events) + (self.text(text) if text else b"")

    def text(self, text: str) -> bytes:
        """An event with a piece of the text."""
        return self._event("response.output_text.delta", **self._part, delta=text, logprobs=[])

    def calls(self, chunks: Sequence[ToolCallChunk]) -> bytes:
        """Events with pieces of tool calls."""
        events = []
        for position, chunk in enumerate(chunks):
            index = position if chunk["index"] is None else chunk["index"]
            if index not in self._calls:
                call = self._calls[index] = _make_call(chunk["name"], "", chunk["id"])
                item = {**call, "status": "in_progress"}
                events.append(self._event("response.output_item.added", **self._slot(index), item=item))
            call = self._calls[index]
            if arguments := chunk["args"]:
                call["arguments"] += arguments
                where = {**self._slot(index), "item_id": call["id"]}
                kind = "response.function_call_arguments.delta"
                events.append(self._event(kind, **where, delta=arguments))
        return b"".join(events)

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The last events, with the whole response."""
        part = _make_part(answer.text, answer.annotations)
        for number, annotation in enumerate(part["annotations"]):
            numbered = {"annotation_index": number, "annotation": annotation}
            yield self._event("response.output_text.annotation.added", **self._part, **numbered)
        yield self._event("response.output_text.done", **self._part, text=answer.text, logprobs=[])
        yield self._event("response.content_part.done", **self._part, part=part)
        message = self._message(part)
        yield self._event("response.output_item.done", output_index=0, item=message)
        for index, call in self._calls.items():
            where = {**self._slot(index), "item_id": call["id"]}
            whole_call = {"name": call["name"], "arguments": call["arguments"]}
            yield self._event("response.function_call_arguments.done", **where, **whole_call)
            yield self._event("response.output_item.done", **self._slot(index), item=call)
        whole = self._whole([message, *self._calls.values()], answer)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: RefusedError) -> bytes:
        """An error in the middle of a stream."""
        return self._event("error", message=str(error), code=error.code, param=error.param)

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The reply in one piece."""
        has_message = answer.text or not answer.tool_calls
        output = [self._message(_make_part(answer.text, answer.annotations))] if has_message else []
        functions = ((call["id"], call["function"]) for call in answer.tool_calls)
        output += [_make_call(function["name"], function["arguments"], name) for name, function in functions]
        return self._whole(output, answer)

    def _whole(self, output: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
        reason = reasons.get(answer.finish_reason)
        return {
            **self._head,
            "status": "incomplete" if reason else "completed",
            "incomplete_details": {"reason": reason} if reason else None,
            "output": output,
            **answer.extra_fields,
            "usage": _make_usage(answer.usage),
        }

    def _message(self, part: dict[str, Any]) -> dict[str, Any]:
        head = {"type": "message", "id": self._message_id, "role": "assistant", "status": "completed"}
        return {**head, "content": [part]}

    def _slot(self, index: int) -> dict[str, int]:
        return {"output_index": 1 + list(self._calls).index(index)}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode()


def _make_part(text: str, annotations: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    flat = [{"type": "url_citation", **annotation["url_citation"]} for annotation in annotations]
    return {"type": "output_text", "text": text, "annotations": flat, "logprobs": []}


def _make_call(name: str | None, arguments: str, call_id: str | None) -> dict[str, Any]:
    head = {"type": "function_call", "id": f"fc_{uuid4().hex}", "status": "completed"}
    return {**head, "call_id": call_id or f"call_{uuid4().hex}", "name": name or "", "arguments": arguments}


def _make_usage(usage: UsageMetadata | None) -> dict[str, Any] | None:
    fields = usage_fields(usage, "input", "output")
    if usage and fields:
        num_written = usage.get("input_token_details", {}).get("cache_creation") or 0
        fields["input_tokens_details"]["cache_write_tokens"] = num_written
    return fields
