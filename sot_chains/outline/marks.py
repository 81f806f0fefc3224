"""Marks by which a heading of an outline says what it builds on: "4. Total cost (needs 2, 3)".

The prompts ask for this form, which stands at the end of the heading. Only earlier points count, so no cycle
can arise; other numbers in a mark are ignored. A pure function of text, in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from sot_chains.outline.skeleton import Point

_MARK = re.compile(
    r"[ \t]{0,4}[(（] ?(?:needs|需要) ?[:：]? ?(?:points? )?"
    r"(?P<numbers>none|无|\d{1,3}(?:(?: ?(?:[,，、&]|and|和)){1,2} ?\d{1,3}){0,30}) ?[)）][.。]?$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+")


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
