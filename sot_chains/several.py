"""Taking apart a reply that holds the texts of several points, each begun with its number and heading.

A line is looked at when it is complete. It begins a point if it begins with the number of the next one, or
with number and heading of any later one; a number and heading in the middle of a line begin a point, too,
for models that write everything on one line. Numbered lists within a point stay in it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from sot_chains.echo import PointText
from sot_chains.skeleton import Point

_NUMBER = re.compile(r"[#*\s]{0,8}[(（]?([0-9]{1,3})[.)）、．](?![0-9])")


class SeveralTexts:
    """Takes the raw pieces of one reply, gives back the cleaned text of each point as it becomes clear.

    Args:
        points: The points the reply was asked for, in the order of their numbers.
        begun: Whether the reply was begun with the number and heading of the first.
    """

    def __init__(self, points: Sequence[Point], *, begun: bool) -> None:
        self._points = points
        self._texts = [PointText(point) for point in points]
        self._current = 0 if begun else -1  # -1: in what a model says before it begins
        self._line = ""
        self._headings = [
            re.compile(
                rf"(?:^|(?<=\s))(?:#{{1,6}}\s)?[*(（]{{0,3}}{point.number}[.)）、．]\s?\**{re.escape(point.text)}",
                re.IGNORECASE,
            )
            for point in points
        ]

    def feed(self, piece: str) -> Iterator[tuple[int, str]]:
        """Yields ``(place among the points, text)`` for what is clear now that ``piece`` has arrived."""
        *complete, rest = piece.split("\n")
        for end in complete:
            line, self._line = self._line + end + "\n", ""
            yield from self._read(line)
        self._line += rest

    def end(self) -> Iterator[tuple[int, str]]:
        """Yields the rest, after the last piece."""
        line, self._line = self._line, ""
        yield from self._read(line)
        yield from self._finish()

    def _read(self, line: str) -> Iterator[tuple[int, str]]:
        for segment in self._segments(line):
            if (place := self._begun_by(segment)) is not None:
                yield from self._finish()
                self._current = place
            if self._current >= 0 and (text := self._texts[self._current].feed(segment)):
                yield self._current, text

    def _finish(self) -> Iterator[tuple[int, str]]:
        if self._current >= 0 and (text := self._texts[self._current].end()):
            yield self._current, text

    def _segments(self, line: str) -> list[str]:
        """``line`` cut before each number and heading of a later point."""
        starts, place = {0}, self._current
        for later in range(place + 1, len(self._points)):
            if match := self._headings[later].search(line, max(starts)):
                starts.add(match.start())
        bounds = [*sorted(starts), len(line)]
        return [line[start:end] for start, end in pairwise(bounds) if end > start]

    def _begun_by(self, segment: str) -> int | None:
        for later in range(self._current + 1, len(self._points)):
            if self._headings[later].match(segment.lstrip(" \t")):
                return later
        following = self._current + 1
        if following < len(self._points) and (match := _NUMBER.match(segment)):
            return following if int(match[1]) == self._points[following].number else None
        return None
