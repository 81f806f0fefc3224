"""OpenAI's responses protocol, read as a request for a chat completion and written as its own events. Pure.

https://platform.openai.com/docs/api-reference/responses. Nothing is kept between two requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

from pydantic import Field

from sot_chains.serving.answer import Answer, ToolCall, usage_fields
from sot_chains.serving.schema import Body, ChatRequest, Objects, RefusedError, read_body_as, read_request
from sot_chains.serving.stream import Writer, make_event

# What every response has to hold.
_UNSAID = {
    **{"error": None, "incomplete_details": None, "instructions": None, "metadata": {}},
    **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
}
_STATEFUL = ("previous_response_id", "conversation", "prompt", "background")


class _ResponsesRequest(Body):
    input: str | Objects = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None


def read_responses_request(body: bytes) -> ChatRequest:
    """Reads the body of ``POST /v1/responses`` as a request for a chat completion, as ``read_request``."""
    asked = read_body_as(_ResponsesRequest, body)
    extra = dict(asked.model_extra or {})
    for name in _STATEFUL:
        if extra.pop(name, None):
            raise RefusedError(f"{name}: this server keeps no state; send the whole conversation", param=name)
    if "messages" in extra:
        raise RefusedError("messages are sent as input in this protocol", param="messages")
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    for message in filter(None, map(_read_item, items)):
        if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":  # of the same turn
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    choice = asked.tool_choice
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    given: dict[str, Any] = {
        "max_completion_tokens": asked.max_output_tokens,
        "response_format": _read_format((asked.text or {}).get("format")),
        "reasoning_effort": (asked.reasoning or {}).get("effort"),
        "verbosity": (asked.text or {}).get("verbosity"),
        "tools": [_read_tool(tool) for tool in asked.tools or ()] or None,
        "tool_choice": choice,
    }
    return read_request(json.dumps({**extra, "messages": messages, **given}).encode())


def _read_item(item: Mapping[str, Any]) -> dict[str, Any] | None:
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


class ResponseWriter(Writer):
    """Writes the reply to ``asked`` in the format of OpenAI's responses."""

    def __init__(self, asked: ChatRequest) -> None:
        head = {"id": f"resp_{uuid4().hex}", "created_at": int(time.time()), "model": asked.model}
        self._head = {"object": "response", **head, **_UNSAID}
        self._num_events = 0
        self._items: dict[int, dict[str, Any]] = {}  # of the output by their index, as far as they are begun
        self._part = {"item_id": f"msg_{uuid4().hex}", "output_index": 0, "content_index": 0}

    def begin(self) -> bytes:
        """The first events."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        self._items[0] = self._make_message(_make_part(""))
        events = (
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._item_event("added", 0, content=[]),
            self._event("response.content_part.added", **self._part, part=_make_part("")),
        )
        return b"".join(events)

    def text(self, text: str) -> bytes:
        """An event with a piece of the text."""
        return self._event("response.output_text.delta", **self._part, delta=text, logprobs=[])

    def arguments(self, call: ToolCall, piece: str) -> bytes:
        """Events with a piece of the arguments of a tool call."""
        index, added = call.position + 1, b""
        if index not in self._items:
            self._items[index] = _make_call(call)
            added = self._item_event("added", index, arguments="")
        where = {"output_index": index, "item_id": self._items[index]["id"]}
        return added + self._event("response.function_call_arguments.delta", **where, delta=piece)

    def annotation(self, number: int, annotation: dict[str, Any]) -> bytes:
        """An event with a citation."""
        (flat,) = _make_part("", [annotation])["annotations"]
        numbered = {"annotation_index": number, "annotation": flat}
        return self._event("response.output_text.annotation.added", **self._part, **numbered)

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The last events, with the whole response."""
        part = _make_part(answer.text, answer.annotations)
        yield self._event("response.output_text.done", **self._part, text=answer.text, logprobs=[])
        yield self._event("response.content_part.done", **self._part, part=part)
        self._items[0] = self._make_message(part)
        yield self._item_event("done", 0)
        for index, call in enumerate(answer.calls, 1):
            self._items[index]["arguments"] = call.arguments
            where = {"output_index": index, "item_id": self._items[index]["id"]}
            whole_call = {"name": call.name, "arguments": call.arguments}
            yield self._event("response.function_call_arguments.done", **where, **whole_call)
            yield self._item_event("done", index)
        whole = self._whole([self._items[index] for index in sorted(self._items)], answer)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: RefusedError) -> bytes:
        """An error in the middle of a stream."""
        return self._event("error", message=str(error), code=error.code, param=error.param)

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The reply in one piece."""
        message = self._make_message(_make_part(answer.text, answer.annotations))
        has_message = answer.text or not answer.calls
        return self._whole([*([message] if has_message else []), *map(_make_call, answer.calls)], answer)

    def _whole(self, output: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
        reason = reasons.get(answer.finish_reason)
        return {
            **self._head,
            "status": "incomplete" if reason else "completed",
            "incomplete_details": {"reason": reason} if reason else None,
            "output": output,
            **answer.extra_fields,
            "usage": usage_fields(answer.usage, "input", "output"),
        }

    def _make_message(self, part: dict[str, Any]) -> dict[str, Any]:
        head = {"type": "message", "id": self._part["item_id"], "role": "assistant", "status": "completed"}
        return {**head, "content": [part]}

    def _item_event(self, kind: str, index: int, **begun: Any) -> bytes:
        item = {**self._items[index], **({"status": "in_progress"} if begun else {}), **begun}
        return self._event(f"response.output_item.{kind}", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return make_event(event, kind)


def _make_part(text: str, annotations: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    flat = [{"type": "url_citation", **annotation["url_citation"]} for annotation in annotations]
    return {"type": "output_text", "text": text, "annotations": flat, "logprobs": []}


def _make_call(call: ToolCall) -> dict[str, Any]:
    head = {"type": "function_call", "id": f"fc_{uuid4().hex}", "status": "completed"}
    return {**head, "call_id": call.id, "name": call.name, "arguments": call.arguments}
