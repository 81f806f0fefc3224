"""Lets each row name its drafter: a call may ask for none, or for another than the engine's.

Knows names and drafters. Does not know why a row names one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from local_backend.drafting.draft import EMPTY_DRAFT, Draft, Outcome
from local_backend.drafting.drafter import Drafter, RowView, drafter_name


class ByRow:
    """Drafts each row with the drafter that it names, by ``name_of``, or else with ``default``.

    A named drafter is made at its first use, by ``make``, and learns from the rows that name it.
    """

    def __init__(
        self, default: Drafter, name_of: Callable[[Any], str | None], make: Callable[[str], Drafter]
    ) -> None:
        self._name_of, self._make = name_of, make
        self._drafters: dict[str | None, Drafter] = {None: default, drafter_name(default): default}

    def propose(self, rows: Sequence[RowView]) -> Sequence[Draft]:
        """For each row, the draft of its drafter."""
        drafts = [EMPTY_DRAFT] * len(rows)
        for drafter, numbers in self._groups(rows):
            for number, draft in zip(numbers, drafter.propose([rows[one] for one in numbers]), strict=True):
                drafts[number] = draft
        return drafts

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Pass each outcome on to the row's drafter."""
        for drafter, numbers in self._groups(rows):
            drafter.observe([rows[number] for number in numbers], [outcomes[number] for number in numbers])

    def _groups(self, rows: Sequence[RowView]) -> Iterator[tuple[Drafter, list[int]]]:
        groups: dict[str | None, list[int]] = {}
        for number, row in enumerate(rows):
            groups.setdefault(self._name_of(row), []).append(number)
        for name, numbers in groups.items():
            if name is not None and name not in self._drafters:
                self._drafters[name] = self._make(name)
            yield self._drafters[name], numbers
