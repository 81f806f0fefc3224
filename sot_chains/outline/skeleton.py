"""The skeleton of an answer: its points, read from a list or given by the user as thoughts.

The skeleton stage of Skeleton-of-Thought (arXiv 2307.15337, section 2.1) asks for a numbered list. At the end
of a heading a mark may say what the point builds on: "4. Total cost (needs 2, 3)". Only earlier points count,
so no cycle can arise; other numbers in a mark are ignored.
The module knows nothing of messages, models or prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from operator import attrgetter
from string import Formatter

from pydantic import BaseModel, ConfigDict, Field

from sot_chains.outline.list_parser import OutlineParser, read_marker

_MARK = re.compile(
    r"[ \t]{0,4}[(（] ?(?:needs|需要) ?[:：]? ?(?:points? )?"
    r"(?P<numbers>none|无|\d{1,3}(?:(?: ?(?:[,，、&]|and|和)){1,2} ?\d{1,3}){0,30}) ?[)）][.。]?$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a skeleton."""

    number: int  # its place in the answer, counted from 1
    text: str  # its heading, on one line and without list marker or emphasis
    needs: tuple[int, ...] = ()  # the numbers of the points that must be written before it


@dataclass(frozen=True)
class Skeleton:
    """The outline of an answer: points that can be written without reading each other.

    Attributes:
        points: In reading order, numbered 1, 2, 3, with different texts. May be empty.
    """

    points: tuple[Point, ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Skeleton:
        """A skeleton of ``texts``, numbered from 1."""
        return cls(tuple(Point(number, text) for number, text in enumerate(texts, start=1)))

    @cached_property
    def text(self) -> str:
        """The points as a numbered list, one a line: what the expansion requests show the model."""
        return "\n".join(map("{0.number}. {0.text}".format, self.points))

    @cached_property
    def folded(self) -> tuple[str, ...]:
        """The headings with case folded, to compare with."""
        return tuple(map(str.casefold, map(attrgetter("text"), self.points)))

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)


def parse_skeleton(text: str) -> Skeleton:
    """Reads the numbered or bulleted list in ``text``; see :class:`OutlineParser`.

    Never raises, in linear time. Two points or more are read back from :attr:`Skeleton.text`.
    """
    parser = OutlineParser()
    parser.feed(text)
    parser.end()
    return Skeleton.of(parser.headings)


def split_number(body: str) -> tuple[int | None, str]:
    """The number ``body`` begins with, if any, and what follows."""
    marker = read_marker(body)
    return (marker.number, body[marker.end :]) if marker and marker.number else (None, body)


def read_mark(point: Point, earlier: Iterable[Point]) -> Point:
    """Returns the point without its mark, unless it would be called as an earlier one, with what it needs."""
    text, needs = parse_needs(point.text, point.number)
    is_new = text.casefold() not in [other.text.casefold() for other in earlier]
    return replace(point, text=text if is_new else point.text, needs=needs)


def parse_needs(heading: str, number: int) -> tuple[str, tuple[int, ...]]:
    """Returns the heading of point ``number`` without its mark, and the numbers of the points it needs."""
    mark = _MARK.search(heading)
    if mark is None or not mark.start():
        return heading, ()
    named = {int(one) for one in _NUMBER.findall(mark["numbers"])}
    return heading[: mark.start()], tuple(sorted(one for one in named if 1 <= one < number))


class Thought(BaseModel):
    """One part of an answer, written by one model call.

    Attributes:
        name: Its heading in the answer, which others refer to.
        prompt: The request. ``{question}`` stands for the user's question, and the name of another thought in
            braces for that thought's text, e.g. ``"Add up: {Costs}"``. Write literal braces as ``{{`` and
            ``}}``.
        needs: Further thoughts that are written before, and shown after the prompt.
    """

    model_config = ConfigDict(frozen=True)

    name: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    needs: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of thoughts in the prompt."""
        found = dict.fromkeys(name for _, name, _, _ in Formatter().parse(self.prompt))
        return tuple(name for name in found if name not in (None, "question"))

    @property
    def all_needs(self) -> tuple[str, ...]:
        """The names of all thoughts that are written before this one."""
        return tuple(dict.fromkeys((*self.fields, *self.needs)))

    def request(self, question: str, texts: Mapping[str, str]) -> str:
        """The prompt with the question, and with the texts of the thoughts it builds on, by their names."""
        values, parts = {**texts, "question": question}, Formatter().parse(self.prompt)
        filled = "".join(text + (values[name] if name is not None else "") for text, name, _, _ in parts)
        shown = [f"{name}: {text}" for name, text in texts.items() if name not in self.fields]
        return "\n\n".join([filled, *shown])


def numbered(thoughts: Sequence[Thought]) -> tuple[Point, ...]:
    """The thoughts as points, with the numbers of those they build on.

    Raises:
        ValueError: There is none, a name stands twice or is unknown, or thoughts need each other in a circle.
    """
    if not thoughts:
        raise ValueError("a graph needs at least one thought")
    numbers: dict[str, int] = {}
    for number, thought in enumerate(thoughts, 1):
        if numbers.setdefault(thought.name, number) != number:
            raise ValueError(f"two thoughts are named {thought.name!r}: give each a name of its own")
    for thought in thoughts:
        if unknown := [name for name in thought.all_needs if name not in numbers]:
            raise ValueError(
                f"{thought.name!r} builds on {unknown}, but there are only {sorted(numbers)}, and "
                "{question} in prompts"
            )
    try:
        TopologicalSorter({thought.name: thought.all_needs for thought in thoughts}).prepare()
    except CycleError as error:
        raise ValueError(f"thoughts build on each other in a circle: {' <- '.join(error.args[1])}") from None
    return tuple(
        Point(number, thought.name, tuple(sorted(numbers[name] for name in thought.all_needs)))
        for number, thought in enumerate(thoughts, 1)
    )
