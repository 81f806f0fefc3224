"""What is taken over from an earlier answer to the same question. Knows traces; does not know models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter

from sot_chains.answering.state import Part
from sot_chains.calls.trace import PointTrace, SotTrace
from sot_chains.outline.skeleton import Point


def points_of(trace: SotTrace) -> list[Point]:
    """The points of the skeleton of an earlier answer."""
    needs = {point["number"]: tuple(point["needs"]) for point in trace["points"]}
    return [Point(number, text, needs.get(number, ())) for number, text in enumerate(trace["skeleton"], 1)]


def whole_points(trace: SotTrace | None, points: Sequence[Point]) -> Mapping[str, PointTrace]:
    """By heading, those of ``points`` that the earlier answer has whole, and all they were written from."""
    earlier = {point["label"]: point for point in trace["points"]} if trace else {}
    texts = {point.number: point.text for point in points}
    whole: dict[str, PointTrace] = {}
    needs = {point.text: [texts[number] for number in point.needs] for point in points}
    for text in TopologicalSorter(needs).static_order() if earlier else ():
        point = earlier.get(text)
        if point and point["status"] == "complete" and all(need in whole for need in needs[text]):
            whole[text] = point
    return whole


def take_over(part: Part, earlier: PointTrace | None) -> Part:
    """Gives ``part`` the text that it has in an earlier answer, if that is complete."""
    if earlier is not None and earlier["status"] == "complete":
        part.pieces, part.resumed = [earlier["text"]], earlier
        part.end("complete")
    return part
