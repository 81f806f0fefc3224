"""The plan for the second stage, and the smaller ones a budget may leave. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from sot_chains.skeleton import Point

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """The second stage.

    Attributes:
        points: What to write; none for a plain answer.
        points_per_call: How many of them one call writes.
        change: What a budget made of the plan, in words; ``None`` if nothing.
    """

    points: tuple[Point, ...]
    points_per_call: int
    change: str | None = None

    def groups(self) -> list[Sequence[Point]]:
        """The points of each call."""
        return in_groups(self.points, self.points_per_call)

    def smaller(self) -> list[Plan]:
        """Ever cheaper plans: more points in one call, then fewer points, then none."""
        num, size = len(self.points), self.points_per_call
        plans: list[Plan] = []
        while size < num:
            size = min(num, size * 2)
            plans.append(Plan(self.points, size, f"{size} points in one call, for the budget"))
        plans += [
            Plan(self.points[:fewer], fewer, f"{fewer} of {num} points, for the budget")
            for fewer in range(num - 1, 1, -1)
        ]
        return [*plans, Plan((), 1, "a plain answer, for the budget")]


def in_groups(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """``items`` in groups of ``size``, the last of which may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]
