"""Reads an outline while it is being written: a list with numbers or bullets.

Reading is prefix-stable: a heading read from the beginning of a text is a heading of the whole text. It takes
linear time: each line is read once, and the pattern of a marker is anchored and bounded. Knows texts. Does
not know messages, models or prompts.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from sot_chains.outline.words import num_words

_MARKER = re.compile(
    r"(?:>[ \t]?)?(?:\#{1,6}[ \t]{0,4})?"  # quoted, or a heading of Markdown
    r"(?:[*_]{0,3}[ \t]?\\?[(（\[]?(?P<number>\d{1,3})[*_]{0,3}"
    r"\\?(?:[.．、](?!\d)|[)）\]]|[:：](?=[\s*]))[*_]{0,3}"  # 1.5 is a number, 1:30 a time
    r"|\\?(?P<bullet>[-*+•–])(?=[ \t])(?:[ \t]\[[ xX]\](?=[ \t]))?)"
)
_LONGEST_MARKER = 40
_WORD_CHARACTER = re.compile(r"[^\W_]")
_DECORATION = " *_:：,，、;；"
_FULL_STOP = re.compile(r"(?<=\w[\w'’])[.。…]+$|\.{2,}$")
_MARK = re.compile(r" ?[(（]")  # of what it builds on
_SHORT = 8  # words of a heading with its explanation that stay together
_LEAD = re.compile(r"[:：]\s|：| [-–—] ")  # from a heading to its explanation


class Marker(NamedTuple):
    """What a line of a list begins with."""

    kind: str  # "number", or the bullet
    number: int  # 0 for a bullet
    end: int  # where the text behind it starts


def read_marker(body: str) -> Marker | None:
    """The marker that ``body`` begins with, a line without white space around it; ``None`` without one."""
    match = _MARKER.match(body, 0, _LONGEST_MARKER)
    return match and Marker(match["bullet"] or "number", int(match["number"] or 0), match.end())


class OutlineParser:
    """Reads a list as it is being written. A heading is complete once the next one begins.

    The first marker, a bullet or the number 1, decides which kind opens a point. Lines that follow it
    directly continue its heading; lists below a point and prose after a blank line are left out, and so is
    the explanation in "Heading: explanation" if both together are too long for a heading. A second
    "1." starts the list again, if there is only one point so far, and otherwise ends it.

    Args:
        most_words: Of a heading; a longer one is a sentence, which is left out. ``None`` keeps it. With such
            a bound headings from the second on end with their line.
        most_alike: The share of common words, of all words of two headings, from which on one counts as a
            repetition of the other.

    Attributes:
        headings: The headings of the complete points, without repetitions. It only ever grows.
        has_repeated: Whether a heading has come a second time, as from a model that is in a loop.
        is_over: Whether the list has ended, so that nothing that follows can add a point.
        num_sentences: How many headings were too long.
    """

    def __init__(self, most_words: int | None = None, most_alike: float = 1.0) -> None:
        self.headings: list[str] = []
        self.num_sentences, self._most_words = 0, most_words
        self.has_repeated = self.is_over = False
        self._most_alike = most_alike
        self._seen: set[str] = set()
        self._line = ""  # the line that has not ended yet
        self._kind = ""  # of the markers that open a point
        self._num_points = 0
        self._indent, self._nested_indent = 0, math.inf
        self._heading: list[str] = []  # the lines of the point that is being read
        self._continues = False  # whether a line without a marker belongs to it

    def feed(self, text: str) -> None:
        """Reads the next piece of text."""
        lines = (self._line + text).splitlines(keepends=True)
        # "\r" may be half of "\r\n".
        is_open = bool(lines) and (lines[-1].endswith("\r") or lines[-1].splitlines()[0] == lines[-1])
        self._line = lines.pop() if is_open else ""
        for line in lines:
            self._read(line)
        if self._begins_point(self._line):
            self._complete()

    def end(self) -> None:
        """Reads what is left: the text is whole."""
        self._read(self._line)
        self._line = ""
        self._complete()

    def _begins_point(self, line: str) -> bool:
        """Whether ``line``, which has not ended yet, is sure to begin the next point."""
        if self.is_over or not self._num_points:
            return False
        body = line.strip()
        marker = read_marker(body)
        is_certain = marker is not None and marker.end < len(body)  # "1." may become "1.5"
        return is_certain and self._role(marker, len(line) - len(line.lstrip())) == "point"

    def _role(self, marker: Marker | None, indent: int) -> str:
        """What a line is: a ``"point"``, ``"text"``, ``"nested"`` below a point, or a list's ``"start"``."""
        if marker is None:
            return "text"
        if not self._num_points:
            return "point" if marker.number <= 1 else "text"
        is_deeper = indent > self._indent
        if is_deeper and (marker.number == 1 or indent >= self._nested_indent):
            return "nested"
        if marker.number == 1:
            return "start"
        is_item = marker.kind != self._kind or (not marker.number and indent > self._indent + 1)
        return "nested" if is_item else "point"

    def _read(self, line: str) -> None:
        body, indent = line.strip(), len(line) - len(line.lstrip())
        if self.is_over:
            return
        marker = read_marker(body)
        role = self._role(marker, indent)
        if role == "start" and self._num_points > 1:
            self._complete()
            self.is_over = True
        elif role in ("start", "point") and marker is not None:
            if role == "point":
                self._complete()
            self._heading, self._continues = [body[marker.end :]], True
            if role == "start" or not self._num_points:
                self._kind, self._indent, self._num_points = marker.kind, indent, 0
            self._num_points += 1
            self._nested_indent = math.inf
            if self._most_words and self._num_points > 1:  # short headings end with their line
                self._continues = False
                self._complete()
        elif role == "nested":
            self._nested_indent, self._continues = min(self._nested_indent, indent), False
        elif not _WORD_CHARACTER.search(body):  # rules and fences separate as blank lines do
            self._continues = False
        elif self._continues:
            self._heading.append(body.lstrip("#>"))

    def _complete(self) -> None:
        """Adds the heading that is being read, unless it is empty or a repetition, but for case."""
        heading = _clean(" ".join(self._heading))
        if num_words(heading) > (self._most_words or _SHORT):
            heading = _clean(_LEAD.split(heading, maxsplit=1)[0])
        self._heading = []
        if self._most_words and num_words(_MARK.split(heading)[0]) > self._most_words:
            self.num_sentences += 1
            return
        if not _WORD_CHARACTER.search(heading):
            return
        folded = heading.casefold()
        if folded in self._seen or (
            self._most_alike < 1.0 and any(_alike(folded, seen) >= self._most_alike for seen in self._seen)
        ):
            self.has_repeated = True
            return
        self._seen.add(folded)
        self.headings.append(heading)


def _alike(one: str, other: str) -> float:
    """The share of words, or of characters where no spaces are written, that two headings have in common."""
    words, others = (set(text.split() if " " in text else text) for text in (one, other))
    return len(words & others) / max(1, len(words | others))


def _clean(text: str) -> str:
    """``text`` on one line, without markers, emphasis, a full stop and what leads on to more text."""
    text = _FULL_STOP.sub("", " ".join(text.replace("**", "").split()).strip(_DECORATION))
    start = 0
    while marker := read_marker(text[start : start + _LONGEST_MARKER]):
        start += marker.end
        while start < len(text) and text[start] in _DECORATION:
            start += 1
    return text[start:]
