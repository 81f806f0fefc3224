"""Reads a list as it is being written: an outline in whatever way a model marks its points.

The first marker decides which kind opens a point. Reading is prefix-stable: a heading read from the beginning
of a text is a heading of the whole text. It takes linear time: each line is read once, and every pattern is
anchored and bounded. Knows texts. Does not know messages, models or prompts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from sot_chains.outline.markers import Marker, read_marker

_DOTTED_ITEM = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){1,3}[.)]?[ \t]")  # "1.2", where it is indented
_WORD_CHARACTER = re.compile(r"[^\W_]")
_DECORATION = " *_:："
_SENTENCE_ENDS = (":", "：", ".", "。", "!", "！", "…")
_STRAY_INDENT = 1  # of a list whose first line has lost its indentation
_MOST_MISSING = 2  # numbers that a list on one line may skip at once
_LONGEST_MARKER = 40
_GAP = re.compile(r"(?<=[\s;；,，。])(?=\S)|(?=[①-⑳❶-➓])")
# What may still become a marker at the beginning of a heading.
_OPEN_MARKER = re.compile(r"[\W\d_]*(?:\[[xX][\]\s]*)?")
_LONGEST_OPENING = 200  # characters of a line, in which its marker stands


@dataclass(slots=True)
class _Item:
    """The lines of one point while they are being collected."""

    marker: Marker
    line: int  # its number in the reply
    lines: list[str]
    num_nested: int = 0
    nested_indent: float = math.inf  # of the list below this point
    next_number: float = math.inf  # of the point behind it

    def nest(self, body: str, indent: int) -> None:
        """Folds in an item from a list below this point: "heading: first; second"."""
        if self.lines:
            self.lines[-1] = self.lines[-1].rstrip(_DECORATION + ";；") + ("; " if self.num_nested else ": ")
        self.lines.append(body)
        self.num_nested += 1
        self.nested_indent = min(self.nested_indent, indent)

    @property
    def text(self) -> str:
        """Its heading."""
        return _clean(" ".join(self.lines))

    @property
    def text_with_end(self) -> str:
        """Its heading with the punctuation at its end."""
        return " ".join(self.lines).rstrip(" *_")


class OutlineParser:
    """Reads a list as it is being written. A point is complete once the next one begins.

    Args:
        opening: What the text begins with, before anything is fed.
        most_alike: The share of common words, of all words of two headings, from which on one counts as a
            repetition of the other.
        takes_numbers_only: Whether bullets, letters and the like open no points.

    Attributes:
        headings: The headings of the complete points, without repetitions. It only ever grows.
        has_repeated: Whether a heading has come a second time, as from a model that is in a loop.
        is_over: Whether the list has ended, so that nothing that follows can add a point.
        second_line: The line on which the second point begins, counted from 0; ``None`` before that.
    """

    def __init__(
        self, opening: str = "", most_alike: float = 1.0, *, takes_numbers_only: bool = False
    ) -> None:
        self.headings: list[str] = []
        self._most_alike = most_alike
        self._takes_numbers_only = takes_numbers_only
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
        self._is_doubtful = False  # there are two "1.": the first may introduce the list
        self._is_inline = False  # some line had several points
        self.is_over = False

    def feed(self, text: str) -> None:
        """Reads the next piece of text."""
        lines = (self._line + text).splitlines(keepends=True)
        # "\r" may be half of "\r\n".
        is_open = bool(lines) and (lines[-1].endswith("\r") or lines[-1].splitlines()[0] == lines[-1])
        self._line = lines.pop() if is_open else ""
        for line in lines:
            self._read(line)
        if marker := self._next_marker(self._line):
            self._note_next_point(marker, self._num_lines)

    def end(self) -> None:
        """Reads what is left: the text is whole."""
        self._read(self._line)
        self._line = ""
        self._settle()
        # Two on one line are not enough: "raise it by a factor of 2. Then stop" is one point.
        least = 3 if len(self._items) == 1 else 2 if self._is_inline else 0
        self._complete(len(self._items), least)

    @property
    def begun_heading(self) -> str:
        """The beginning of the heading that is being written; ``""`` if none is certain.

        However the heading goes on, it starts with this.
        """
        if marker := self._next_marker(self._line):
            body = self._line.strip()[marker.end :]
            heading = "" if _OPEN_MARKER.fullmatch(body) else _clean(body)
        else:
            heading = self._items[-1].text if len(self._items) > self._num_complete else ""
        return heading.rstrip(_DECORATION + ";；")

    def _next_marker(self, line: str) -> Marker | None:
        """The marker of ``line``, which has not ended yet, if it is sure to begin the next point."""
        if self.is_over or not self._items:
            return None
        body = line[:_LONGEST_OPENING].strip()
        marker = read_marker(body, self._kind)
        is_certain = marker is not None and marker.end < len(body)  # "1." may become "1.5"
        is_next = is_certain and self._role(marker, _indent(line[:_LONGEST_OPENING])) == "point"
        return marker if is_next else None

    @property
    def _kind(self) -> str | None:
        return self._items[0].marker.kind if self._items else None

    def _role(self, marker: Marker | None, indent: int) -> str:
        """What a line is: it starts a ``"point"`` or a ``"list"``, or is ``"nested"`` or ``"text"``."""
        if marker is None:
            return "text"
        if not self._items:
            is_first = marker.number == 1 or marker.is_bullet
            is_taken = marker.kind == "number" or not self._takes_numbers_only
            return "point" if is_first and is_taken else "text"
        item = self._items[-1]
        is_deeper = indent > self._base_indent
        if marker.kind != self._kind:
            is_introduced = item.marker.is_bullet and len(self._items) == 1 and not is_deeper
            return "list" if is_introduced and marker[:2] == ("number", 1) else "nested"
        if marker.is_bullet:
            return "nested" if indent > self._base_indent + _STRAY_INDENT else "point"
        if is_deeper and (marker.number == 1 or indent >= item.nested_indent):
            return "nested"
        return "list" if marker.number == 1 else "point"

    def _read(self, line: str) -> None:
        self._num_lines += 1
        body = line.strip()
        if self.is_over:
            return
        if not _WORD_CHARACTER.search(body):  # rules and fences separate as blank lines do
            self._after_blank = True
            return
        indent, items = _indent(line), self._items
        marker = read_marker(body, self._kind)
        role = self._role(marker, indent)
        rest = body[marker.end :] if marker else body
        if role == "list" and marker is not None:
            self._read_first_again(marker, rest, indent)
        elif role == "point" and marker is not None:
            self._base_indent = self._base_indent if items else indent
            if items:
                self._note_next_point(marker, self._num_lines - 1)
            self._outside = False
            items.append(_Item(marker, self._num_lines - 1, [rest]))
        elif not items or self._outside:
            pass
        elif self._after_blank and indent <= self._base_indent:
            self._outside = True
            self._is_interrupted = self._is_interrupted or len(items) == 1
            if not self._is_interrupted:
                self._finish()
        elif role == "nested":
            items[-1].nest(rest, indent)
        elif indent > self._base_indent and (dotted := _DOTTED_ITEM.match(body)):
            items[-1].nest(body[dotted.end() :], indent)
        elif not self._is_half_marker(body):
            items[-1].lines.append(body.lstrip("#>"))
        self._after_blank = False

    def _is_half_marker(self, body: str) -> bool:
        """Whether a line is only the beginning of a marker, as at the end of a reply that was cut."""
        wholes = [body + end for end in (".", ")", "]")] if len(body) <= _LONGEST_MARKER else []
        markers = [(whole, read_marker(whole, self._kind)) for whole in wholes]
        return any(mark and mark.kind == self._kind and mark.end == len(whole) for whole, mark in markers)

    def _read_first_again(self, marker: Marker, rest: str, indent: int) -> None:
        """Reads a "1." after another, or after a bullet."""
        items = self._items
        if items[0].marker.is_bullet:
            items.clear()
            self._base_indent, self._outside = indent, False
        elif items[-1].marker.number == 1:  # like all before it
            if len(items) == 1:
                self._is_doubtful = True
            else:
                self._note_next_point(marker, self._num_lines - 1)
            self._outside = False
        else:
            self._finish()
            return
        items.append(_Item(marker, self._num_lines - 1, [rest]))

    def _settle(self) -> None:
        """Decides about the first of two "1.": it introduces the list if it alone is a sentence."""
        if self._is_doubtful:
            first, second = (item.text_with_end.endswith(_SENTENCE_ENDS) for item in self._items)
            self._is_doubtful = False
            if first and not second:
                del self._items[0]
            else:
                self.second_line = self._items[1].line

    def _finish(self) -> None:
        self.is_over = True
        self._settle()
        self._complete(len(self._items))

    def _note_next_point(self, marker: Marker, line_number: int) -> None:
        """A point begins on a line, so those before it are complete."""
        self._settle()
        last = self._items[-1]
        last.next_number = marker.number
        if self.second_line is None:
            self.second_line = line_number
        is_skipping = marker.number > last.marker.number + 1
        self._complete(len(self._items), least=2 if is_skipping else 0)

    def _complete(self, num_items: int, least: int = 0) -> None:
        """Adds the headings of the first items; the last may be ``least`` points or more on one line."""
        for number, item in enumerate(self._items[self._num_complete : num_items], self._num_complete + 1):
            headings = _split_line(item) if least and number == num_items else [item.text]
            if len(headings) < least:
                headings = [item.text]
            self._is_inline = self._is_inline or len(headings) > 1
            for heading in headings:
                self._add(heading)
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


def _split_line(item: _Item) -> list[str]:
    """The points on the line of ``item``, by markers of its kind whose numbers lie below the next."""
    text, kind, number = item.text, item.marker.kind, item.marker.number
    pieces, start = [], 0
    for match in _GAP.finditer(text):
        place = match.end()
        marker = read_marker(text[place : place + _LONGEST_MARKER], kind)
        if place < start or marker is None or marker.kind != kind or not marker.is_strict:
            continue
        if number <= marker.number < min(number + 2 + _MOST_MISSING, item.next_number):
            pieces.append(text[start:place])
            start, number = place + marker.end, marker.number
    return [_clean(piece.rstrip(" ;；,，")) for piece in [*pieces, text[start:]]]


def _clean(text: str) -> str:
    """``text`` on one line, without markers before it, emphasis around it and what leads on to more text."""
    text = " ".join(text.replace("**", "").split()).strip(_DECORATION)
    start = 0
    while marker := read_marker(text[start : start + _LONGEST_MARKER]):
        if not (marker.is_bullet or (marker.kind == "number" and marker.is_strict)):
            break
        start += marker.end
        while start < len(text) and text[start] in _DECORATION:
            start += 1
    return text[start:]
