"""Reads the outline a model wrote as a list of points, whole or while it is being written.

The skeleton stage of Skeleton-of-Thought (arXiv 2307.15337, section 2.1) asks for a numbered list.
Models answer with all kinds of numbered lists, so this module is generous in what it accepts and
strict in one thing: numbers count 1, 2, 3. "2024. the year" never becomes a point.

Parsing is prefix-stable: a point read from the beginning of a text is a point of the whole text.
It takes linear time: each line is read once, and every pattern is anchored and bounded, so no input makes
one backtrack. The module knows nothing of messages, models or prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

_DIGITS = "([0-9０-９]{1,3})"
# "1." "1、" "1．" (no digit may follow: 1.5 is a number), "1)" "1）" "(1)" "（1）", or any in bold.
_MARKER = re.compile(
    rf"(?:\#{{1,6}}[ \t]{{0,4}})?(?P<bold>\*\*)?[ \t]?"
    rf"(?:[(（]{_DIGITS}[)）]|{_DIGITS}(?:\*\*)?(?:[.．、](?![0-9０-９])|[)）]))"
)
# What opens an item below a point: a bullet, "a.", "iv)", and where it is indented "1.2".
_NESTED_ITEM = re.compile(
    r"(?:[-+*•‣◦·–—][ \t]|[A-Za-z][.)][ \t]|[ivx]{2,4}[.)][ \t]|"
    r"(?P<dotted>[0-9]{1,3}(?:\.[0-9]{1,3}){1,3}[.)]?[ \t]))"
)
# A marker in the middle of a line, for lists a model wrote on one line.
_INLINE_MARKER = re.compile(rf"(?<=[\s;；,，。])[(（]?{_DIGITS}(?:[.)）](?=\s)|[、．](?![0-9０-９]))")
_WORD_CHARACTER = re.compile(r"[^\W_]")
_DECORATION = " *:："
_LONGEST_OPENING = 200  # characters of a line, in which its marker stands


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a skeleton.

    Attributes:
        number: Its place in the answer, counted from 1.
        text: Its heading, on one line and without list marker or emphasis.
    """

    number: int
    text: str


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
        return "\n".join(f"{point.number}. {point.text}" for point in self.points)

    @cached_property
    def folded(self) -> tuple[str, ...]:
        """The headings with case folded, to compare with."""
        return tuple(point.text.casefold() for point in self.points)

    def first(self, count: int | None) -> Skeleton:
        """The skeleton without the points after the first ``count``; ``None`` keeps all."""
        return self if count is None else Skeleton(self.points[:count])

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)


def parse_skeleton(text: str) -> Skeleton:
    """Reads the numbered list in ``text``.

    A point begins at a marker at the start of a line whose number is the next one. Until the next
    marker its lines are joined; indented or bulleted items below it are folded into it; after a blank
    line, unindented prose is not part of it. Such prose ends the list, unless it follows the first point:
    then it may follow each. Repeated points are dropped. A second "1." ends the list, unless the list so
    far has a single point: then that was prose that happened to begin with "1.".
    A list that was written on one line is taken apart when it has at least three points.

    Never raises and takes time linear in ``len(text)``. A skeleton of two points or more is read back from
    its own :attr:`Skeleton.text`.
    """
    parser = OutlineParser()
    parser.feed(text)
    parser.end()
    return Skeleton.of(parser.headings)


@dataclass(slots=True)
class _Item:
    """The lines of one point while they are being collected."""

    lines: list[str]
    num_nested: int = 0
    next_nested_number: int = 0  # 0: no numbered list below this point yet

    def nest(self, body: str) -> None:
        """Folds in an item from a list below this point: "heading: first; second"."""
        if self.lines:
            self.lines[-1] = self.lines[-1].rstrip(_DECORATION + ";；") + ("; " if self.num_nested else ": ")
        self.lines.append(body)
        self.num_nested += 1

    @property
    def text(self) -> str:
        return _clean(" ".join(self.lines))


class OutlineParser:
    """Reads a numbered list as it is being written. A point is complete once the next one begins.

    Args:
        opening: What the text begins with, before anything is fed.
        most_alike: The share of common words, of all words of two headings, from which on one counts as a
            repetition of the other.

    Attributes:
        headings: The headings of the complete points, without repetitions. It only ever grows.
        has_repeated: Whether a heading has come a second time, as from a model that is in a loop.
        is_over: Whether the list has ended, so that nothing that follows can add a point.
        second_line: The line on which the second point begins, counted from 0; ``None`` before that.
    """

    def __init__(self, opening: str = "", most_alike: float = 1.0) -> None:
        self.headings: list[str] = []
        self._most_alike = most_alike
        self.has_repeated = False
        self.second_line: int | None = None
        self._seen: set[str] = set()
        self._items: list[_Item] = []
        self._num_complete = 0
        self._num_lines = 0
        self._line = opening  # the line that has not ended yet
        self._base_indent = 0
        self._after_blank = self._outside = False  # outside: in prose that interrupts or follows the list
        self._is_interrupted = False  # by prose after the first point: every point may be followed by some
        self.is_over = False

    def feed(self, text: str) -> None:
        """Reads the next piece of text."""
        lines = (self._line + text).splitlines(keepends=True)
        # "\r" may be half of "\r\n".
        is_open = bool(lines) and (lines[-1].endswith("\r") or lines[-1].splitlines()[0] == lines[-1])
        self._line = lines.pop() if is_open else ""
        for line in lines:
            self._read(line)
        if self._items and self._begins_next_point(self._line):
            self._note_next_point(len(self._items))

    def end(self) -> None:
        """Reads what is left: the text is whole."""
        self._read(self._line)
        self._line = ""
        if len(self._items) == 1:
            for heading in _split_line(self._items[0].text):
                self._add(heading)
        else:
            self._complete(len(self._items))

    @property
    def begun_heading(self) -> str:
        """The beginning of the heading that is being written; ``""`` if none is.

        However the heading goes on, it starts with this.
        """
        if self._items and self._begins_next_point(self._line):
            heading = _clean(marker_of(self._line.strip())[1])
        else:
            heading = self._items[-1].text if len(self._items) > self._num_complete else ""
        return heading.rstrip(_DECORATION + ";；")

    def _begins_next_point(self, line: str) -> bool:
        """Whether ``line``, which has not ended yet, is sure to begin the next point."""
        if self.is_over:
            return False
        line = line[:_LONGEST_OPENING]
        body = line.strip()
        number = marker_of(body)[0]
        is_certain = bool((match := _MARKER.match(body)) and match.end() < len(body))  # "1." may become "1.5"
        return is_certain and number == len(self._items) + 1 and not self._is_nested(number, _indent(line))

    def _is_nested(self, number: int | None, indent: int) -> bool:
        """Whether a marker opens an item of a numbered list below the last point."""
        if number is None or not self._items or indent <= self._base_indent:
            return False
        return number in (1, self._items[-1].next_nested_number)

    def _read(self, line: str) -> None:
        self._num_lines += 1
        body = line.strip()
        if self.is_over:
            return
        if not _WORD_CHARACTER.search(body):  # rules and fences separate as blank lines do
            self._after_blank = True
            return
        indent, items = _indent(line), self._items
        number, rest = marker_of(body)
        if number is not None and self._is_nested(number, indent):
            items[-1].nest(rest)
            items[-1].next_nested_number = number + 1
        elif number == len(items) + 1:
            self._base_indent = self._base_indent if items else indent
            items.append(_Item([rest]))
            self._outside = False
            self._note_next_point(len(items) - 1, line_number=self._num_lines - 1)
        elif number == 1 and indent <= self._base_indent:
            if len(items) > 1:
                self.is_over = True
                self._complete(len(items))
            else:
                items[:], self._base_indent, self._outside = [_Item([rest])], indent, False
        elif not items or self._outside:
            pass
        elif self._after_blank and indent <= self._base_indent:
            self._outside = True
            self._is_interrupted = self._is_interrupted or len(items) == 1
            if not self._is_interrupted:
                self.is_over = True
                self._complete(len(items))
        elif (nested := _NESTED_ITEM.match(body)) and (indent > self._base_indent or not nested["dotted"]):
            items[-1].nest(body[nested.end() :])
        else:
            items[-1].lines.append(body)
        self._after_blank = False

    def _note_next_point(self, num_complete: int, line_number: int | None = None) -> None:
        """A point begins after ``num_complete`` others, so these are complete."""
        if num_complete == 1 and self.second_line is None:
            self.second_line = self._num_lines if line_number is None else line_number
        self._complete(num_complete)

    def _complete(self, num_items: int) -> None:
        for item in self._items[self._num_complete : num_items]:
            self._add(item.text)
        self._num_complete = max(self._num_complete, num_items)

    def _add(self, heading: str) -> None:
        """Adds a heading, unless it is empty or a repetition, which differs at most in case."""
        folded = heading.casefold()
        is_repetition = folded in self._seen or (
            self._most_alike < 1.0 and any(_alike(folded, seen) >= self._most_alike for seen in self._seen)
        )
        self.has_repeated = self.has_repeated or is_repetition
        if _WORD_CHARACTER.search(heading) and not is_repetition:
            self._seen.add(folded)
            self.headings.append(heading)


def _alike(one: str, other: str) -> float:
    """The share of words, or of characters where no spaces are written, that two headings have in common."""
    words, others = (set(text.split() if " " in text else text) for text in (one, other))
    return len(words & others) / max(1, len(words | others))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def marker_of(body: str) -> tuple[int | None, str]:
    """The number ``body`` begins with, if any, and what follows."""
    if not (match := _MARKER.match(body)):
        return None, body
    opening = "**" if match["bold"] else ""  # emphasis opened before the number closes somewhere after it
    return int(match[2] or match[3]), opening + body[match.end() :]


def _split_line(text: str) -> list[str]:
    """The points of a list written on one line, its first marker gone; ``[text]`` if it is not one."""
    pieces, start, number = [], 0, 2
    for match in _INLINE_MARKER.finditer(text):
        if int(match[1]) == number:
            pieces.append(text[start : match.start()])
            start, number = match.end(), number + 1
    # Two are not enough: "raise it by a factor of 2. Then stop" is one point.
    return (
        [text] if len(pieces) < 2 else [_clean(piece.rstrip(" ;；,，")) for piece in [*pieces, text[start:]]]
    )


def _clean(text: str) -> str:
    """``text`` on one line, without emphasis around it and without what would lead on to more text."""
    return " ".join(text.replace("**", "").split()).strip(_DECORATION)
