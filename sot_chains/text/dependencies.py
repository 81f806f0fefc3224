"""Marks by which a heading of an outline says what it builds on: "4. Total cost (needs 2, 3)".

A mark names earlier points only, so that no cycle can come about; other numbers in it are ignored. A pure
function of text, in time linear in it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from sot_chains.text.skeleton import Skeleton

_LONGEST_MARK = 160
_GAP = "[ \t]{0,2}"
_NUMBER = "[0-9０-９]{1,3}"
_WORD = f"(?:(?:points?|steps?|items?|parts?|no\\.?|第){_GAP})?#?"
_ITEM = f"{_WORD}{_NUMBER}[点步项]?"
_JOINT = rf"{_GAP}(?:,{_GAP}and\b|[,;&+、，；和与及]|\band\b|\bor\b|\bto\b|\bthrough\b|[-–—~至到]){_GAP}"
_SURE = "(?:needs?|requires?|depend(?:s|ing)? on|builds? on|based on|依赖于?|需要|基于)"
_OTHER = "(?:uses?|using|from|after|given|follows|with|by|using the results? of|参考|根据)"
_IN_BRACKETS = rf"[*_]{{0,2}}[(（\[【{{]{_GAP}(?:(?P<sure>{_SURE})|{_OTHER})"
_BARE = rf"[-–—,;:，；：]?{_GAP}\b(?P<bare>{_SURE})"
_MARK = re.compile(
    rf"[ \t]{{0,4}}(?:{_IN_BRACKETS}|{_BARE})[ \t:：]{{0,3}}(?:the )?(?P<list>{_ITEM}(?:{_JOINT}{_ITEM})*)"
    rf"{_GAP}[)）\]】}}]?[*_]{{0,2}}[.。;]?$",
    re.IGNORECASE,
)
_TO = f"{_GAP}(?:[-–—~至到]|to|through){_GAP}"
_RANGE = re.compile(f"({_NUMBER})[点步项]?{_TO}{_WORD}({_NUMBER})", re.IGNORECASE)
_ONE = re.compile(_NUMBER)


def needs_of(heading: str, number: int) -> tuple[str, tuple[int, ...]]:
    """A heading without its mark, and the numbers of the earlier points that the mark names.

    Args:
        heading: The heading of a point.
        number: The number of the point.
    """
    heading = heading.rstrip()
    start = max(0, len(heading) - _LONGEST_MARK)
    mark = _MARK.search(heading, start)
    if mark is None or not (rest := heading[: mark.start()].rstrip(" \t-–—,;:，；：")):
        return heading, ()
    named = {int(one) for one in _ONE.findall(mark["list"])}
    for first, last in _RANGE.findall(mark["list"]):
        named.update(range(int(first), min(int(last), number) + 1))
    needs = tuple(sorted(one for one in named if 1 <= one < number))
    if not needs and not (mark["sure"] or mark["bare"]):
        return heading, ()  # "(from 5 to 9)" may be something else
    return rest, needs


def with_needs(skeleton: Skeleton) -> Skeleton:
    """The skeleton with the marks of its headings read and removed."""
    points = []
    for point in skeleton:
        text, needs = needs_of(point.text, point.number)
        points.append(replace(point, text=text, needs=needs))
    return Skeleton(tuple(points))
