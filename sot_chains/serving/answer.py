"""The answer to one request: how it is written, where its text ends, and what the client is told of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import uuid4

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.runnables import Runnable

from sot_chains.calls.usage import num_message_tokens, num_tokens
from sot_chains.providers.base import ProviderError, find_ending
from sot_chains.providers.langchain import find_finish_reason
from sot_chains.serving.schema import RefusedError

Answers = Runnable[LanguageModelInput, AIMessage]
PREDICTED = ("accepted_prediction", "rejected_prediction")  # tokens of the usage, as OpenAI names them
_TRACE_FIELDS = ("route", "skeleton", "is_complete", "failures", "seconds", "num_calls")


@dataclass
class TextLimit:
    """Ends a text before the first stop string, or after a number of tokens."""

    stop: Sequence[str] = ()  # none of them is empty
    max_tokens: int | None = None  # that are left; None for no limit
    count: Callable[[str], int] = len  # the tokens of a text
    is_over: bool = False  # all further text is dropped
    is_out_of_tokens: bool = False  # it ended at the number of tokens
    _held: str = ""  # the beginning of a stop string

    def feed(self, text: str) -> str:
        """The text to show now that ``text`` has arrived; the beginning of a stop string is held back."""
        if self.is_over:
            return ""
        whole = self._held + text
        if ends := [index for stop in self.stop if (index := whole.find(stop)) >= 0]:
            shown = self._counted(whole[: min(ends)])
            self.is_over, self._held = True, ""
            return shown
        is_half = "\ud800" <= whole[-1:] <= "\udbff"  # of a character, whose rest comes next
        num_held = max(is_half, *(_num_begun(whole, stop) for stop in self.stop), 0)
        self._held = whole[len(whole) - num_held :]
        return self._counted(whole[: len(whole) - num_held])

    def end(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return "" if self.is_over else self._counted(held)

    def _counted(self, text: str) -> str:
        if self.max_tokens is None or not text:
            return text
        num_tokens = self.count(text)
        if num_tokens <= self.max_tokens:
            self.max_tokens -= num_tokens
            return text
        shown = text[: len(text) * self.max_tokens // num_tokens]
        self.max_tokens, self._held = 0, ""
        self.is_over = self.is_out_of_tokens = True
        return shown


def _num_begun(text: str, stop: str) -> int:
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass
class ToolCall:
    """A tool call, as far as it is written."""

    position: int  # among the calls of the answer
    id: str
    name: str
    own_id: str | None  # the model's own id, which it may give to several calls
    number: Any  # the model's own, if it numbers its calls
    arguments: str = ""
    num_told: int = 0  # characters of the arguments


@dataclass
class Answer:
    """The answer to one request, while it is written and afterwards."""

    answers: Answers  # writes it
    messages: list[BaseMessage]
    parameters: Mapping[str, Any]  # of the call
    limit: TextLimit = field(default_factory=TextLimit)  # where its text ends, if the calls are not told
    reason: str | None = None  # why it is written this way, if that was decided for the client
    may_call: bool = False  # whether tools are offered
    # Finds citations beside the reported ones.
    cite: Callable[[str], Sequence[Mapping[str, Any]]] | None = None
    text: str = ""  # so far
    reported: UsageMetadata | None = None  # the tokens of the calls that reported them
    metadata: dict[str, Any] = field(default_factory=dict)  # response_metadata of the finished message
    calls: list[ToolCall] = field(default_factory=list)  # so far
    annotations: list[dict[str, Any]] = field(default_factory=list)  # citations so far, in OpenAI's format
    _num_told: int = 0  # of the annotations
    _is_streamed: bool = False

    async def stream(self) -> AsyncGenerator[tuple[str, list[tuple[ToolCall, str]]], None]:
        """Writes it and yields text and pieces of the arguments of tool calls as they arrive."""
        stream = self.answers.astream(self.messages, **self.parameters)
        try:
            async with aclosing(cast("AsyncGenerator[AIMessageChunk, None]", stream)) as chunks:
                async for chunk in chunks:
                    text, pieces = self._read(chunk)
                    if text or pieces:
                        yield text, pieces
        except ProviderError as error:
            self._take_empty(error)
        self.text += (rest := self.limit.end())
        self.calls = [call for call in self.calls if call.name]
        for call in self.calls:
            call.arguments = call.arguments or "{}"
        if (pieces := _untold(self.calls, is_last=True)) or rest:
            yield rest, pieces
        await self._end()

    async def write(self) -> None:
        """Writes it as a whole."""
        if self.may_call:  # LangChain joins pieces of calls by their numbers, which some models do not give
            async for _ in self.stream():
                pass
            return
        try:
            self._read(await self.answers.ainvoke(self.messages, **self.parameters))
        except ProviderError as error:
            self._take_empty(error)
        self.text += self.limit.end()
        await self._end()

    def _read(self, message: AIMessage) -> tuple[str, list[tuple[ToolCall, str]]]:
        """Takes in a chunk or a whole message; returns the text and the arguments that it adds."""
        if (usage := message.usage_metadata) and usage["total_tokens"]:
            self.reported = add_usage(self.reported, usage)
        new = message.response_metadata.get("citations") or []
        self.annotations += map(_make_annotation, new)
        cited = [*self.metadata.get("citations", ()), *new]
        self.metadata |= {**message.response_metadata, **({"citations": cited} if cited else {})}
        # Chunks after the end of the text are read, too: the usage is in the last one.
        text = self.limit.feed(message.content if isinstance(message.content, str) else str(message.text))
        self.text += text
        if isinstance(message, AIMessageChunk):
            self._is_streamed = True
            return text, _untold(list(map(self._read_call, message.tool_call_chunks)))
        begin, known, invalid = self._begin, message.tool_calls, message.invalid_tool_calls
        calls = [
            *(begin(one["id"], one["name"], json.dumps(one["args"], ensure_ascii=False)) for one in known),
            *(begin(one["id"], one["name"], one["args"] or "{}") for one in invalid),  # clients may repair it
        ]
        return text, _untold(calls)

    def _read_call(self, piece: ToolCallChunk) -> ToolCall:
        """Takes in a piece of a tool call; returns the call."""
        number, own_id, name, arguments = piece["index"], piece["id"] or None, piece["name"], piece["args"]
        ids = (None,) if name or number is None else (None, own_id)  # some give each piece another id
        same = [one for one in self.calls if one.number == number and own_id in (*ids, one.own_id)]
        call = same[-1] if same else None
        if call and call.name and name and own_id is None:
            is_written, is_named_again = _is_json(call.arguments), name == call.name
            if (is_written and (arguments or not is_named_again)) or (number is None and not is_named_again):
                call = None
        if call is None:
            call = self._begin(own_id, name, number=number)
        elif name and name != call.name and not call.arguments:
            call.name += name
        call.arguments += arguments or ""
        return call

    def _begin(self, own_id: str | None, name: str | None, said: str = "", number: Any = None) -> ToolCall:
        is_taken = any(call.id == own_id for call in self.calls)
        call_id = f"call_{uuid4().hex[:24]}" if is_taken or not own_id else own_id
        call = ToolCall(len(self.calls), call_id, name or "", own_id, number, said)
        self.calls.append(call)
        return call

    def _take_empty(self, error: ProviderError) -> None:
        trace: Any = error.trace
        reason = trace and trace["plain_call"] and trace["plain_call"]["finish_reason"]
        if not reason or self.text or find_ending(reason) == "failed":
            raise error
        self.reported, self.metadata = trace["usage"], {"sot": trace}

    async def _end(self) -> None:
        trace = self.metadata.get("sot")
        if trace is None or trace["plain_call"] is not None:
            ending, is_empty = find_ending(self._reasons[0]), not self.text and not self.calls
            if ending == "failed" or (ending == "calls" and is_empty):
                raise RefusedError(f"the model broke off its answer: {self._reasons[0]}", 502)
        if self.cite:  # on a thread: a long answer and long references take a while
            self.annotations += map(_make_annotation, await asyncio.to_thread(self.cite, self.text))

    def untold(self) -> list[tuple[int, dict[str, Any]]]:
        """The annotations that have come since it was last asked for them, with their numbers."""
        told, self._num_told = self._num_told, len(self.annotations)
        return list(enumerate(self.annotations))[told:]

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        endings = set(map(find_ending, self._reasons))
        if "filtered" in endings and not self.limit.is_out_of_tokens:
            return "content_filter"
        if self.limit.is_out_of_tokens or endings & {"length", "failed"}:
            return "length"
        return "tool_calls" if self.calls else "stop"

    @property
    def _reasons(self) -> list[str | None]:
        trace = self.metadata.get("sot")
        if trace is None:
            return [find_finish_reason(self.metadata, is_streamed=self._is_streamed)]
        if (call := trace["plain_call"]) is not None:
            if (reason := call["finish_reason"]) and (find_ending(reason) != "whole" or not self.text):
                return [reason]
            failures = {one["label"]: one["reason"] for one in trace["failures"]}
            return [(trace["plain_stopped_by"] and "stop") or failures.get("plain answer")]
        # A point that was left out, or shortened to whole sentences, is no fault.
        cut = [one for one in trace["failures"] if one["status"] in ("cut", "failed")]
        calls: dict[int, Any] = {0: trace["skeleton_call"], **{one["number"]: one for one in trace["points"]}}
        ended = [calls[one["number"]]["finish_reason"] for one in cut]
        return [
            one["reason"] if find_ending(reason) == "whole" else reason
            for one, reason in zip(cut, ended, strict=True)
        ]

    @property
    def num_calls(self) -> int:
        """The number of model calls."""
        return int(self.metadata["sot"]["num_calls"]) if "sot" in self.metadata else 1

    @property
    def usage(self) -> UsageMetadata:
        """The tokens of all calls, as reported or else estimated."""
        if self.reported is not None:
            return self.reported
        num_in = num_message_tokens(self.messages)
        num_out = num_tokens(self.text + "".join(call.arguments for call in self.calls))
        return UsageMetadata(input_tokens=num_in, output_tokens=num_out, total_tokens=num_in + num_out)

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Fields of a reply that are not OpenAI's: how the answer was written."""
        if (trace := self.metadata.get("sot")) is None:
            return {}
        reason = self.reason or trace["route_reason"]
        return {"sot": {**{name: trace[name] for name in _TRACE_FIELDS}, "route_reason": reason}}


def _untold(calls: Sequence[ToolCall], *, is_last: bool = False) -> list[tuple[ToolCall, str]]:
    pieces: list[tuple[ToolCall, str]] = []
    for call in calls:
        is_half = not is_last and "\ud800" <= call.arguments[-1:] <= "\udbff"
        end = len(call.arguments) - is_half
        if call.name and (piece := call.arguments[call.num_told : end]):
            pieces.append((call, piece))
            call.num_told = end
    return pieces


def _is_json(text: str) -> bool:
    with suppress(ValueError):
        json.loads(text)
        return True
    return False


def _make_annotation(citation: Mapping[str, Any]) -> dict[str, Any]:
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
    return {"type": "url_citation", "url_citation": span}


def usage_fields(usage: UsageMetadata, read: str, written: str) -> dict[str, Any]:
    """The tokens under the names that a protocol has for those ``read`` and ``written``."""
    of_read: Mapping[str, Any] = usage.get("input_token_details", {})
    of_written: Mapping[str, Any] = usage.get("output_token_details", {})
    predicted = {f"{name}_tokens": of_written.get(name) or 0 for name in PREDICTED}
    return {
        f"{read}_tokens": usage["input_tokens"],
        f"{written}_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        f"{read}_tokens_details": {
            "cached_tokens": of_read.get("cache_read") or 0,
            "cache_write_tokens": of_read.get("cache_creation") or 0,
        },
        f"{written}_tokens_details": {"reasoning_tokens": of_written.get("reasoning") or 0, **predicted},
    }
