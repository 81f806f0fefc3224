"""What is shown of one answer: a lane of text, its model calls in time, and what they took.

Knows finished messages and their traces. Does not know HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.messages import AIMessage

from sot_chains.calls.trace import CallTrace, PointTrace, SotTrace

_LONGEST_NAME = 60


@dataclass(frozen=True)
class Part:
    """Text of one source.

    Attributes:
        text: The text.
        source: Where it was copied from; ``None`` if no document contains it.
    """

    text: str
    source: str | None = None


@dataclass(frozen=True)
class Block:
    """A point, or a whole plain answer.

    Attributes:
        heading: The heading of a point, with its number.
        parts: Its text.
        note: Why it is not whole, if it is not.
    """

    heading: str
    parts: tuple[Part, ...]
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """One model call in time, in seconds since the answer was begun."""

    label: str
    start: float
    first_text: float | None
    end: float


@dataclass(frozen=True)
class Lane:
    """One answer.

    Attributes:
        name: A short name without blanks, of which its colour follows: ``"plain"``, ``"sot"``, ``"copy"``.
        title: Its name for people.
        note: How it came about, or why there is none.
        blocks: What was written.
        bars: Its model calls.
        seconds: From beginning to end; ``None`` if there is no answer.
    """

    name: str
    title: str
    note: str = ""
    blocks: tuple[Block, ...] = ()
    bars: tuple[Bar, ...] = ()
    seconds: float | None = None
    first_text_seconds: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    num_calls: int | None = None
    price: float | None = None

    @property
    def sources(self) -> list[str]:
        """The sources it copies from, in the order of its text."""
        parts = [part for block in self.blocks for part in block.parts]
        return list(dict.fromkeys(part.source for part in parts if part.source is not None))


def lane_of(
    name: str,
    title: str,
    message: AIMessage,
    *,
    seconds: float | None = None,
    first_text_seconds: float | None = None,
) -> Lane:
    """The lane of a finished answer.

    Args:
        name: See :class:`Lane`.
        title: See :class:`Lane`.
        message: An answer of ``SkeletonOfThought``, or one with citations in ``response_metadata``.
        seconds: How long it took, if its trace does not tell.
        first_text_seconds: When its first text came, if its trace does not tell.
    """
    trace: SotTrace | None = message.response_metadata.get("sot")
    usage = message.usage_metadata
    lane = Lane(
        name,
        title,
        seconds=seconds,
        first_text_seconds=first_text_seconds,
        input_tokens=usage["input_tokens"] if usage else None,
        output_tokens=usage["output_tokens"] if usage else None,
    )
    text = str(message.text)
    if trace is None:
        block = Block("", _parts(text, message.response_metadata.get("citations") or []))
        bars = [] if seconds is None else [Bar("answer", 0.0, first_text_seconds, seconds)]
        return replace(lane, blocks=(block,), bars=tuple(bars), num_calls=1)
    if trace["route"] != "plain":
        parts = (*trace["points"], trace.get("conclusion"))
        blocks = [
            Block(
                f"{point['number']}. {point['label']}" if point["number"] else "",
                (Part(point["text"]),),
                point["reason"] or "",
            )
            for point in parts
            if point and point["status"] != "omitted"
        ]
    else:
        notes = [failure["reason"] for failure in trace["failures"]]
        blocks = [Block("", (Part(text),), "".join(notes[:1]))]
    return replace(
        lane,
        note=trace["route_reason"] if name != "plain" else "",  # it was to be plain: nothing to tell
        blocks=tuple(blocks),
        bars=tuple(_bars(trace)),
        seconds=trace["seconds"],
        first_text_seconds=trace["first_text_seconds"],
        num_calls=trace["num_calls"],
        price=trace["cost"]["price"],
    )


def _bars(trace: SotTrace) -> list[Bar]:
    bars = [_bar("outline", trace["skeleton_call"])] if trace["skeleton_call"] else []
    bars += [_bar(f"{point['number']}. {point['label']}{_after(point)}", point) for point in trace["points"]]
    if conclusion := trace.get("conclusion"):
        bars.append(_bar("conclusion", conclusion))
    return bars + ([_bar("plain answer", trace["plain_call"])] if trace["plain_call"] else [])


def _after(point: PointTrace) -> str:
    needs = point.get("needs")
    return f" (after {', '.join(map(str, needs))})" if needs else ""


def _bar(label: str, call: CallTrace) -> Bar:
    return Bar(label, call["start_seconds"], call["first_text_seconds"], call["end_seconds"])


def _parts(text: str, citations: Sequence[Mapping[str, Any]]) -> tuple[Part, ...]:
    """``text`` in parts of one source each; an overlap of citations goes to the longest."""
    owner: list[str | None] = [None] * len(text)
    for citation in sorted(citations, key=lambda one: one["end"] - one["start"]):
        cited = slice(citation["start"], min(citation["end"], len(text)))
        owner[cited] = [_source_of(citation)] * len(owner[cited])
    parts: list[Part] = []
    start = 0
    for place in range(1, len(text) + 1):
        if place == len(text) or owner[place] != owner[start]:
            parts.append(Part(text[start:place], owner[start]))
            start = place
    return tuple(parts)


def _source_of(citation: Mapping[str, Any]) -> str:
    metadata = citation["metadata"]
    name = metadata.get("source") or metadata.get("title") or citation["document_id"]
    shown = str(name or f"document {citation['document'] + 1}")
    return shown if len(shown) <= _LONGEST_NAME else "…" + shown[1 - _LONGEST_NAME :]
