"""Marks by which a heading of an outline says what it builds on: "4. Total cost (needs 2, 3)".

The prompts ask for this form, which stands at the end of the heading. Only earlier points count, so no cycle
can arise; other numbers in a mark are ignored. A pure function of text, in linear time.
"""

from __future__ import annotations

import re
from dataclasses import replace

from sot_chains.outline.skeleton import Point

_MARK = re.compile(
    r"[ \t]{0,4}[(（] ?(?:needs|需要) ?[:：]? ?(?:points? )?"
    r"(?P<numbers>none|无|\d{1,3}(?:(?: ?(?:[,，、&]|and|和)){1,2} ?\d{1,3}){0,30}) ?[)）][.。]?$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+")


class MarkReader:
    """Reads the marks of the points, one point after the other.

    Attributes:
        points: The points so far, without their marks, with what they build on.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._texts: set[str] = set()

    def read(self, point: Point) -> Point:
        """Returns the point without its mark, with the points it builds on."""
        text, needs = parse_needs(point.text, point.number)
        if text.casefold() in self._texts:  # points have different texts
            text = point.text
        self._texts.add(text.casefold())
        self.points.append(replace(point, text=text, needs=needs))
        return self.points[-1]


def parse_needs(heading: str, number: int) -> tuple[str, tuple[int, ...]]:
    """Returns the heading of point ``number`` without its mark, and the numbers of the points it needs."""
    mark = _MARK.search(heading)
    if mark is None or not mark.start():
        return heading, ()
    named = {int(one) for one in _NUMBER.findall(mark["numbers"])}
    return heading[: mark.start()], tuple(sorted(one for one in named if 1 <= one < number))
