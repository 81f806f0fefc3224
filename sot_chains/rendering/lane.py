"""What is shown of one answer: a lane of text, its model calls in time, and what they took.

Knows finished messages and their traces. Does not know HTML.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader
from langchain_core.messages import AIMessage

from sot_chains.calls.trace import PointTrace, SotTrace

_LONGEST_SOURCE = 60


class Part(NamedTuple):
    """Text of one source."""

    text: str
    source: str | None = None  # where it was copied from; None if no document contains it


@dataclass(frozen=True)
class Lane:
    """One answer, or why there is none."""

    name: str  # a short name without blanks, which gives the colour: "plain", "sot", "copy"
    title: str
    note: str = ""  # why it took its route, or why there is no answer
    message: AIMessage | None = None  # of SkeletonOfThought, or with citations in its metadata
    seconds: float | None = None  # None if there is no answer
    first_text_seconds: float | None = None
    price: float | None = None

    @property
    def trace(self) -> SotTrace | None:
        """How an answer of ``SkeletonOfThought`` came about."""
        trace: SotTrace | None = self.message.response_metadata.get("sot") if self.message else None
        return trace

    @property
    def points(self) -> list[PointTrace]:
        """The points and the conclusion; of an answer in one piece none."""
        if self.trace is None or self.trace["route"] == "plain":
            return []
        points = [*self.trace["points"], *filter(None, [self.trace["conclusion"]])]
        return [point for point in points if point["status"] != "omitted"]

    @cached_property
    def parts(self) -> list[Part]:
        """The text of an answer in one piece, by source."""
        text = str(self.message.text) if self.message else ""
        citations = self.message.response_metadata.get("citations") or [] if self.message else []
        owner: list[str | None] = [None] * len(text)
        for citation in sorted(citations, key=lambda one: one["end"] - one["start"]):
            cited = slice(citation["start"], min(citation["end"], len(text)))
            owner[cited] = [_find_source(citation)] * len(owner[cited])
        by_source = groupby(zip(owner, text, strict=True), key=itemgetter(0))
        return [Part("".join(letter for _, letter in letters), source) for source, letters in by_source]

    @property
    def sources(self) -> list[str]:
        """The sources it copies from, in the order of its text."""
        return list(dict.fromkeys(part.source for part in self.parts if part.source is not None))

    @property
    def calls(self) -> list[tuple[str, Mapping[str, Any]]]:
        """The model calls with their labels; times are in seconds since the answer was begun."""
        if (trace := self.trace) is None:
            call = {"start_seconds": 0.0, "first_text_seconds": self.first_text_seconds}
            return [] if self.seconds is None else [("answer", {**call, "end_seconds": self.seconds})]
        calls: list[tuple[str, Mapping[str, Any] | None]] = [("skeleton", trace["skeleton_call"])]
        for point in trace["points"]:
            after = f" (after {', '.join(map(str, point['needs']))})" if point["needs"] else ""
            calls.append((f"{point['number']}. {point['label']}{after}", point))
        calls += [("conclusion", trace["conclusion"]), ("plain answer", trace["plain_call"])]
        return [(label, call) for label, call in calls if call]


def make_lane(
    name: str,
    title: str,
    message: AIMessage,
    seconds: float | None = None,
    first_text_seconds: float | None = None,
) -> Lane:
    """The lane of an answer of ``SkeletonOfThought``, or of one with citations in ``response_metadata``."""
    trace: SotTrace | None = message.response_metadata.get("sot")
    if trace is None:
        return Lane(name, title, "", message, seconds, first_text_seconds)
    note = trace["route_reason"] if name != "plain" else ""  # plain decoding was chosen by the user
    times = trace["seconds"], trace["first_text_seconds"]
    return Lane(name, title, note, message, *times, trace["cost"]["price"])


def _find_source(citation: Mapping[str, Any]) -> str:
    metadata = citation["metadata"]
    name = metadata.get("source") or metadata.get("title") or citation["document_id"]
    shown = str(name or f"document {citation['document'] + 1}")
    return shown if len(shown) <= _LONGEST_SOURCE else "…" + shown[1 - _LONGEST_SOURCE :]


TEMPLATES = Path(__file__).with_name("templates")
_environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)


def render(template: str, **values: Any) -> str:
    """The text that a template makes of ``values``, which are escaped in it."""
    return _environment.get_template(template).render(**values)


@dataclass(frozen=True)
class Run:
    """Answers to one question by one model, side by side. Jupyter displays it."""

    question: str
    model: str
    lanes: tuple[Lane, ...] = ()

    def _repr_html_(self) -> str:
        return render("notebook.html", run=self)

    def fragment(self) -> str:
        """The answers, a timeline and a table, without their style."""
        return render("run.html", run=self)

    def page(self) -> str:
        """A document of its own, which needs no other file."""
        return render("page.html", run=self)
