"""What is taken over from an earlier answer to the same question. Knows traces; does not know models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Literal, TypeVar

from sot_chains.calls.trace import PointState, PointTrace
from sot_chains.outline.skeleton import Point

_Name = TypeVar("_Name", int, str)


def whole_of(
    earlier: Mapping[_Name, PointTrace], needs: Mapping[_Name, Sequence[_Name]]
) -> dict[_Name, PointTrace]:
    """The points of an earlier answer that are complete, and so is all they were written from.

    Args:
        earlier: The points of the earlier answer.
        needs: What each point of the answer builds on.
    """
    whole: dict[_Name, PointTrace] = {}
    for name in TopologicalSorter(needs).static_order():
        point = earlier.get(name)
        if point and point["status"] == "complete" and all(need in whole for need in needs[name]):
            whole[name] = point
    return whole


def place_of(
    point: Point | None, earlier: PointTrace | None, part: Literal["conclusion"] | None = None
) -> PointState:
    """A place, with the text that it has in an earlier answer if that is complete."""
    if earlier is None or earlier["status"] != "complete":
        return PointState(point, part=part)
    place = PointState(point, pieces=[earlier["text"]], resumed=earlier, part=part)
    place.end("complete")
    return place
