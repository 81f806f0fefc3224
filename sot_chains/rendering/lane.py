"""What is shown of one answer: a lane of text, its model calls in time, and what they took.

Knows finished messages and their traces. Does not know HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from langchain_core.messages import AIMessage

from sot_chains.calls.trace import CallTrace, PointTrace, SotTrace

_LONGEST_SOURCE = 60


@dataclass(frozen=True)
class Part:
    """Text of one source."""

    text: str
    source: str | None = None  # where it was copied from; None if no document contains it


@dataclass(frozen=True)
class Block:
    """A point, or a whole plain answer."""

    heading: str  # of a point, with its number
    parts: tuple[Part, ...]
    note: str = ""  # why it is incomplete


@dataclass(frozen=True)
class Bar:
    """One model call in time, in seconds since the answer was begun."""

    label: str
    start: float
    first_text: float | None
    end: float


@dataclass(frozen=True)
class Lane:
    """One answer."""

    name: str  # a short name without blanks, which gives the colour: "plain", "sot", "copy"
    title: str
    note: str = ""  # why it took its route, or why there is no answer
    blocks: tuple[Block, ...] = ()
    bars: tuple[Bar, ...] = ()
    seconds: float | None = None  # None if there is no answer
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


def make_lane(
    name: str,
    title: str,
    message: AIMessage,
    seconds: float | None = None,
    first_text_seconds: float | None = None,
) -> Lane:
    """The lane of an answer of ``SkeletonOfThought``, or of one with citations in ``response_metadata``."""
    trace: SotTrace | None = message.response_metadata.get("sot")
    usage = message.usage_metadata
    lane = Lane(
        name,
        title,
        input_tokens=usage["input_tokens"] if usage else None,
        output_tokens=usage["output_tokens"] if usage else None,
        num_calls=trace["num_calls"] if trace else 1,
    )
    if trace is None:
        parts = _parts(str(message.text), message.response_metadata.get("citations") or [])
        bars = () if seconds is None else (Bar("answer", 0.0, first_text_seconds, seconds),)
        lane = replace(lane, seconds=seconds, first_text_seconds=first_text_seconds)
        return replace(lane, blocks=(Block("", parts),), bars=bars)
    return replace(
        lane,
        note=trace["route_reason"] if name != "plain" else "",  # plain decoding was chosen by the user
        blocks=_blocks(trace, str(message.text)),
        bars=_bars(trace),
        seconds=trace["seconds"],
        first_text_seconds=trace["first_text_seconds"],
        price=trace["cost"]["price"],
    )


def _blocks(trace: SotTrace, text: str) -> tuple[Block, ...]:
    if trace["route"] == "plain":
        notes = [failure["reason"] for failure in trace["failures"]]
        return (Block("", (Part(text),), "".join(notes[:1])),)
    points = [*trace["points"], *filter(None, [trace["conclusion"]])]
    return tuple(
        Block(_heading(point) if point["number"] else "", (Part(point["text"]),), point["reason"] or "")
        for point in points
        if point["status"] != "omitted"
    )


def _bars(trace: SotTrace) -> tuple[Bar, ...]:
    calls: list[tuple[str, CallTrace | None]] = [("skeleton", trace["skeleton_call"])]
    for point in trace["points"]:
        after = f" (after {', '.join(map(str, point['needs']))})" if point["needs"] else ""
        calls.append((_heading(point) + after, point))
    calls += [("conclusion", trace["conclusion"]), ("plain answer", trace["plain_call"])]
    return tuple(
        Bar(label, call["start_seconds"], call["first_text_seconds"], call["end_seconds"])
        for label, call in calls
        if call
    )


def _heading(point: PointTrace) -> str:
    return f"{point['number']}. {point['label']}"


def _parts(text: str, citations: Sequence[Mapping[str, Any]]) -> tuple[Part, ...]:
    owner: list[str | None] = [None] * len(text)
    for citation in sorted(citations, key=lambda one: one["end"] - one["start"]):
        cited = slice(citation["start"], min(citation["end"], len(text)))
        owner[cited] = [_find_source(citation)] * len(owner[cited])
    by_source = groupby(zip(owner, text, strict=True), key=itemgetter(0))
    return tuple(Part("".join(letter for _, letter in letters), source) for source, letters in by_source)


def _find_source(citation: Mapping[str, Any]) -> str:
    metadata = citation["metadata"]
    name = metadata.get("source") or metadata.get("title") or citation["document_id"]
    shown = str(name or f"document {citation['document'] + 1}")
    return shown if len(shown) <= _LONGEST_SOURCE else "…" + shown[1 - _LONGEST_SOURCE :]


TEMPLATES = Path(__file__).with_name("templates")
_environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)


@dataclass(frozen=True)
class Run:
    """Answers to one question by one model, side by side. Jupyter displays it."""

    question: str
    model: str
    lanes: tuple[Lane, ...] = ()

    def _repr_html_(self) -> str:
        return self._rendered("notebook.html")

    def fragment(self) -> str:
        """The answers, a timeline and a table, without their style."""
        return self._rendered("run.html")

    def page(self) -> str:
        """A document of its own, which needs no other file."""
        return self._rendered("page.html")

    def _rendered(self, template: str) -> str:
        longest = max((bar.end for lane in self.lanes for bar in lane.bars), default=0.0)
        return _environment.get_template(template).render(run=self, longest=longest)
