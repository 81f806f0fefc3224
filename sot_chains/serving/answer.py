"""The answer to one request: how it is written, where its text ends, and what the client is told of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import uuid4

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.runnables import Runnable

from sot_chains.calls.usage import num_message_tokens, num_tokens
from sot_chains.providers.base import find_ending
from sot_chains.serving.schema import RefusedError

Answers = Runnable[LanguageModelInput, AIMessage]
_TRACE_FIELDS = ("route", "skeleton", "is_complete", "failures", "seconds", "num_calls")


@dataclass
class TextLimit:
    """Ends a text before the first stop string, or after a number of tokens.

    A model that writes in one piece is told both. The calls of a skeleton are not: a stop string would end
    the outline, and a number of tokens would limit every point by itself.
    """

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
    """How many of the last characters of ``text`` are the beginning of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass
class ToolCall:
    """A tool call, as far as it is written."""

    position: int  # among the calls of the answer
    id: str
    name: str
    number: Any  # the model's own, if it numbers its calls
    arguments: str = ""


@dataclass
class Answer:
    """The answer to one request, while it is written and afterwards."""

    answers: Answers  # writes it
    messages: list[BaseMessage]
    parameters: Mapping[str, Any]  # of the call
    limit: TextLimit = field(default_factory=TextLimit)  # where its text ends, if the calls are not told
    reason: str | None = None  # why it is written this way, if that was decided for the client
    # Finds citations beside the reported ones.
    cite: Callable[[str], Sequence[Mapping[str, Any]]] | None = None
    text: str = ""  # so far
    reported: UsageMetadata | None = None  # the tokens of the calls that reported them
    metadata: dict[str, Any] = field(default_factory=dict)  # response_metadata of the finished message
    calls: list[ToolCall] = field(default_factory=list)  # so far
    annotations: list[dict[str, Any]] = field(default_factory=list)  # citations in OpenAI's format

    async def stream(self) -> AsyncGenerator[tuple[str, list[tuple[ToolCall, str]]], None]:
        """Writes it and yields text and pieces of the arguments of tool calls as they arrive."""
        stream = self.answers.astream(self.messages, **self.parameters)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk, None]", stream)) as chunks:
            async for chunk in chunks:
                if chunk.usage_metadata:
                    self.reported = add_usage(self.reported, chunk.usage_metadata)
                if chunk.response_metadata:
                    self.metadata |= chunk.response_metadata
                pieces = [self._read_call(piece) for piece in getattr(chunk, "tool_call_chunks", ())]
                # Chunks after the end of the text are read, too: the usage is in the last one.
                text = self.limit.feed(chunk.content if isinstance(chunk.content, str) else str(chunk.text))
                self.text += text
                if text or pieces:
                    yield text, pieces
        if rest := self.limit.end():
            self.text += rest
            yield rest, []
        await self._end()

    def _read_call(self, piece: ToolCallChunk) -> tuple[ToolCall, str]:
        """Takes in a piece of a tool call; returns the call and the new arguments.

        Models that do not number the pieces begin each call with its name.
        """
        number, call_id, name, arguments = piece["index"], piece["id"], piece["name"], piece["args"] or ""
        call = next((one for one in reversed(self.calls) if one.number == number), None)
        if call is None or (name and call_id != call.id and (call_id or number is None)):
            call = self._begin_call(call_id, name, number)
        call.arguments += arguments
        return call, arguments

    def _begin_call(self, call_id: str | None, name: str | None, number: Any = None) -> ToolCall:
        call = ToolCall(len(self.calls), call_id or f"call_{uuid4().hex[:24]}", name or "", number)
        self.calls.append(call)
        return call

    async def write(self) -> None:
        """Writes it as a whole."""
        message = await self.answers.ainvoke(self.messages, **self.parameters)
        self.reported, self.metadata = message.usage_metadata, message.response_metadata
        self.text = self.limit.feed(str(message.text)) + self.limit.end()
        written = [(call, json.dumps(call["args"], ensure_ascii=False)) for call in message.tool_calls]
        invalid = [(call, call["args"] or "") for call in message.invalid_tool_calls]  # clients may repair
        for call, arguments in (*written, *invalid):
            self._begin_call(call["id"], call["name"]).arguments = arguments
        await self._end()

    async def _end(self) -> None:
        trace = self.metadata.get("sot")
        is_plain = trace is None or trace["plain_call"] is not None
        if is_plain and find_ending(self._reasons[0]) == "failed":
            raise RefusedError(f"the model broke off its answer: {self._reasons[0]}", 502)
        citations = list(self.metadata.get("citations") or [])
        if self.cite:  # on a thread: a long answer and long references take a while
            citations += await asyncio.to_thread(self.cite, self.text)
        self.annotations = list(map(_make_annotation, citations))

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        if self.limit.is_out_of_tokens:
            return "length"
        if self.calls:
            return "tool_calls"
        endings = set(map(find_ending, self._reasons))
        if "filtered" in endings:
            return "content_filter"
        return "length" if endings & {"length", "failed"} else "stop"

    @property
    def _reasons(self) -> list[str | None]:
        """Why what was not completed ended, as the model reports it, or else what went wrong."""
        trace = self.metadata.get("sot")
        if trace is None:
            return [self.metadata.get("finish_reason") or self.metadata.get("stop_reason")]
        if (call := trace["plain_call"]) is not None:
            failures = {one["label"]: one["reason"] for one in trace["failures"]}
            stopped = trace["plain_stopped_by"] and "stop"
            return [call["finish_reason"] or stopped or failures.get("plain answer")]
        # A point that was shortened to whole sentences is complete.
        cut = [point for point in trace["points"] if point["status"] == "cut"]
        return [point["finish_reason"] or point["reason"] for point in cut if not point["stopped_by"]]

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
    of_read, of_written = usage.get("input_token_details", {}), usage.get("output_token_details", {})
    return {
        f"{read}_tokens": usage["input_tokens"],
        f"{written}_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        f"{read}_tokens_details": {
            "cached_tokens": of_read.get("cache_read") or 0,
            "cache_write_tokens": of_read.get("cache_creation") or 0,
        },
        f"{written}_tokens_details": {"reasoning_tokens": of_written.get("reasoning") or 0},
    }
