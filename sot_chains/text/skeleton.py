"""What a model wrote when asked for an outline, read as a list of points.

The skeleton stage of Skeleton-of-Thought (arXiv 2307.15337, section 2.1) asks for a numbered list.
Models answer with all kinds of numbered lists, so this module is generous in what it accepts and
strict in one thing: numbers count 1, 2, 3. "2024. the year" never becomes a point.

Everything here is a pure function of text and takes linear time: lines are looked at once, and every
pattern is anchored and bounded, so no input makes one backtrack. The module knows nothing of
messages, models or prompts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
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
    line, unindented prose is not part of it. Repeated points are dropped. A second "1." ends the list,
    unless the list so far has a single point: then that was prose that happened to begin with "1.".
    A list that was written on one line is taken apart when it has at least three points.

    Never raises, takes time linear in ``len(text)``, and ``parse_skeleton(skeleton.text) == skeleton``.
    """
    texts = _distinct(item.text for item in _items(text))
    if len(texts) == 1:
        texts = _distinct(_split_line(texts[0]))
    return Skeleton.of(texts)


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

    def continues_nested_list(self, number: int) -> bool:
        """Whether an indented ``number`` belongs to a list below this point."""
        if number not in (1, self.next_nested_number):
            return False
        self.next_nested_number = number + 1
        return True

    @property
    def text(self) -> str:
        return _clean(" ".join(self.lines))


def _items(text: str) -> list[_Item]:
    items: list[_Item] = []
    base_indent = 0
    after_blank = outside = False  # outside: in prose that interrupts or follows the list
    for line in text.splitlines():
        body = line.strip()
        if not body or not _WORD_CHARACTER.search(body):  # rules and fences separate as blank lines do
            after_blank = True
            continue
        indent = len(line) - len(line.lstrip())
        number, rest = _marker(body)
        if number is not None and items and indent > base_indent and items[-1].continues_nested_list(number):
            items[-1].nest(rest)
        elif number == len(items) + 1:
            base_indent = base_indent if items else indent
            items.append(_Item([rest]))
            outside = False
        elif number == 1 and indent <= base_indent:
            if len(items) > 1:
                break
            items, base_indent, outside = [_Item([rest])], indent, False
        elif not items or outside:
            pass
        elif after_blank and indent <= base_indent:
            outside = True
        elif (nested := _NESTED_ITEM.match(body)) and (indent > base_indent or not nested["dotted"]):
            items[-1].nest(body[nested.end() :])
        else:
            items[-1].lines.append(body)
        after_blank = False
    return items


def _marker(body: str) -> tuple[int | None, str]:
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


def _distinct(texts: Iterable[str]) -> list[str]:
    """``texts`` without the empty ones and without repetitions, which differ at most in case."""
    first_seen: dict[str, str] = {}
    for text in texts:
        if _WORD_CHARACTER.search(text):
            first_seen.setdefault(text.casefold(), text)
    return list(first_seen.values())


def skeleton_of(reply: str, reply_start: str | None, max_points: int | None) -> Skeleton:
    """The skeleton in ``reply``, which may or may not go on from ``reply_start``.

    A model may continue the reply begun for it or start again; the reading with more points is right.
    """
    skeleton = parse_skeleton(reply)
    if reply_start:
        skeleton = max(parse_skeleton(reply_start + reply), skeleton, key=len)
    return skeleton.first(max_points)


class GrowingSkeleton:
    """A skeleton whose reply is still being written.

    Args:
        reply_start: What the reply was begun with.
        max_points: How many points to take.
    """

    def __init__(self, reply_start: str | None, max_points: int | None) -> None:
        self._reply_start = reply_start
        self._max_points = max_points
        self._lines: list[str] = []
        self._rest = ""

    def feed(self, text: str) -> Skeleton | None:
        """The skeleton in the lines that are complete, if ``text`` has completed any."""
        *complete, rest = text.split("\n")
        for line in complete:
            self._lines.append(self._rest + line)
            self._rest = ""
        self._rest += rest
        if not complete:
            return None
        return skeleton_of("\n".join(self._lines) + "\n", self._reply_start, self._max_points)


class OutlineReply:
    """Takes the outline as it comes, and tells how far it has grown.

    Args:
        growing: Makes a new growing skeleton, once the request is known.
        grow: Called with the skeleton so far whenever a line is complete; ``None`` if nobody wants to know.
        ungrow: Called when the outline is asked for again; ``False`` if what it began has been read.
    """

    def __init__(
        self,
        growing: Callable[[], GrowingSkeleton],
        grow: Callable[[Skeleton], None] | None,
        ungrow: Callable[[], bool],
    ) -> None:
        self._new_growing = growing
        self._growing: GrowingSkeleton | None = None
        self._grow = grow
        self._ungrow = ungrow
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The reply so far."""
        return "".join(self._pieces)

    def take(self, text: str) -> None:
        """Takes the next piece."""
        self._pieces.append(text)
        if self._grow:
            if self._growing is None:  # not before the request was made: it decides how the reply begins
                self._growing = self._new_growing()
            if skeleton := self._growing.feed(text):
                self._grow(skeleton)

    def start_over(self) -> bool:
        """Forgets it, for another attempt."""
        if not self._ungrow():
            return False
        self._pieces, self._growing = [], None
        return True
