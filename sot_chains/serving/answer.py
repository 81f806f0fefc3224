"""The answer to one request: how it is written, where its text ends, and what the client is told of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import uuid4

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.runnables import Runnable

from sot_chains.providers.base import is_filtered, is_out_of_tokens

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
        num_held = max((_num_begun(whole, stop) for stop in self.stop), default=0)
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
class Answer:
    """The answer to one request, while it is written and afterwards."""

    answers: Answers  # writes it
    messages: list[BaseMessage]
    parameters: Mapping[str, Any]  # of the call
    limit: TextLimit = field(default_factory=TextLimit)  # where its text ends, if the calls are not told
    reason: str | None = None  # why it is written this way, if that was decided for the client
    cite: Callable[[str], Sequence[Mapping[str, Any]]] | None = (
        None  # finds citations beside the reported ones
    )
    text: str = ""  # so far
    usage: UsageMetadata | None = None  # of all calls; None if none was reported
    metadata: dict[str, Any] = field(default_factory=dict)  # response_metadata of the finished message
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # of an answer written as a whole
    annotations: list[dict[str, Any]] = field(default_factory=list)  # citations in OpenAI's format
    _calls_tools: bool = False

    async def stream(self) -> AsyncGenerator[tuple[str, list[ToolCallChunk]], None]:
        """Writes it and yields text or pieces of tool calls as they arrive."""
        stream = self.answers.astream(self.messages, **self.parameters)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk, None]", stream)) as chunks:
            async for chunk in chunks:
                if chunk.usage_metadata:
                    self.usage = add_usage(self.usage, chunk.usage_metadata)
                if chunk.response_metadata:
                    self.metadata |= chunk.response_metadata
                calls = getattr(chunk, "tool_call_chunks", [])
                self._calls_tools |= bool(calls)
                # Chunks after the end of the text are read, too: the usage is in the last one.
                text = self.limit.feed(chunk.content if isinstance(chunk.content, str) else str(chunk.text))
                self.text += text
                if text or calls:
                    yield text, calls
        if rest := self.limit.end():
            self.text += rest
            yield rest, []
        await self._annotate()

    async def write(self) -> None:
        """Writes it as a whole."""
        message = await self.answers.ainvoke(self.messages, **self.parameters)
        self.usage, self.metadata = message.usage_metadata, message.response_metadata
        self.text = self.limit.feed(str(message.text)) + self.limit.end()
        self.tool_calls = _make_tool_calls(message)
        self._calls_tools = bool(self.tool_calls)
        await self._annotate()

    async def _annotate(self) -> None:
        citations = list(self.metadata.get("citations") or [])
        if self.cite:  # on a thread: a long answer and long references take a while
            citations += await asyncio.to_thread(self.cite, self.text)
        self.annotations = _make_annotations(citations)

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        if self.limit.is_out_of_tokens:
            return "length"
        if self._calls_tools:
            return "tool_calls"
        trace = self.metadata.get("sot")
        if trace is None:
            reasons = [self.metadata.get("finish_reason") or self.metadata.get("stop_reason")]
        elif trace["plain_call"] is not None:
            reasons = [trace["plain_call"]["finish_reason"]]
        else:  # a point that was shortened to whole sentences is complete
            reasons = [point["finish_reason"] for point in trace["points"] if point["status"] == "cut"]
        if any(map(is_filtered, reasons)):
            return "content_filter"
        return "length" if any(map(is_out_of_tokens, reasons)) else "stop"

    @property
    def num_calls(self) -> int:
        """The number of model calls."""
        return int(self.metadata["sot"]["num_calls"]) if "sot" in self.metadata else 1

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Fields of a reply that are not OpenAI's: how the answer was written."""
        if (trace := self.metadata.get("sot")) is None:
            return {}
        reason = self.reason or trace["route_reason"]
        return {"sot": {**{name: trace[name] for name in _TRACE_FIELDS}, "route_reason": reason}}


def _make_tool_calls(message: AIMessage) -> list[dict[str, Any]]:
    calls: list[tuple[Any, str]] = [
        *((call, json.dumps(call["args"], ensure_ascii=False)) for call in message.tool_calls),
        *((call, call["args"] or "") for call in message.invalid_tool_calls),  # the client may repair them
    ]
    return [
        {
            "id": call["id"] or f"call_{uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call["name"], "arguments": arguments},
        }
        for call, arguments in calls
    ]


def _make_annotations(citations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
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


def usage_fields(usage: UsageMetadata | None, read: str, written: str) -> dict[str, Any] | None:
    """The tokens under the names that a protocol has for those ``read`` and ``written``."""
    if usage is None:
        return None
    of_read, of_written = usage.get("input_token_details", {}), usage.get("output_token_details", {})
    return {
        f"{read}_tokens": usage["input_tokens"],
        f"{written}_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        f"{read}_tokens_details": {"cached_tokens": of_read.get("cache_read") or 0},
        f"{written}_tokens_details": {"reasoning_tokens": of_written.get("reasoning") or 0},
    }
