"""Plain decoding: nothing is drafted, every forward lands one token."""

from __future__ import annotations

from collections.abc import Sequence

from local_backend.draft import EMPTY_DRAFT, Draft, Outcome
from local_backend.drafters.base import WritingRow


class Autoregressive:
    """Proposes nothing. What every other drafter must agree with, token by token."""

    def propose(self, rows: Sequence[WritingRow]) -> Sequence[Draft]:
        """An empty draft for each row."""
        return [EMPTY_DRAFT] * len(rows)

    def observe(self, rows: Sequence[WritingRow], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""
