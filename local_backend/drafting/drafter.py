"""The interface of drafters: propose drafts, observe their outcomes. And the drafter that proposes nothing.

Knows drafts and outcomes. Does not know the engine, the model or the cache.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from local_backend.drafting.draft import EMPTY_DRAFT, Draft, Outcome


class RowView(Protocol):
    """What a drafter sees of a row: always the same object, compared by identity, weakly referable."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and all emitted tokens."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def references(self) -> Sequence[Sequence[int]]:
        """Token ids of texts that may be copied."""

    @property
    def room(self) -> int:
        """How many more tokens the row may emit; a deeper draft is cut."""


@runtime_checkable
class Drafter(Protocol):
    """Guesses the next tokens of rows.

    Drafts never change the generated text: a wrong draft only costs time.
    """

    def propose(self, rows: Sequence[RowView]) -> Sequence[Draft]:
        """One draft for each row, possibly empty, in the order of ``rows``."""

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Receive the outcomes of the last drafts for ``rows``, whose ``token_ids`` already include them.

        A row may have finished with this outcome, or may end without a call: keep per-row state in
        :class:`~local_backend.drafting.drafter.PerRow`.
        """


class RowByRow:
    """A drafter that drafts each row by itself."""

    def propose(self, rows: Sequence[RowView]) -> Sequence[Draft]:
        """One draft for each row; empty if no token is likely enough."""
        return [self._draft(row) for row in rows]

    def _draft(self, row: RowView) -> Draft:
        raise NotImplementedError


StateT = TypeVar("StateT")


class PerRow(Generic[StateT]):
    """One state for each row, created by ``make`` at first access and dropped with the row.

    ``make`` must not refer to the row, or neither is ever freed.
    """

    def __init__(self, make: Callable[[RowView], StateT]) -> None:
        self._make = make
        self._states: weakref.WeakKeyDictionary[RowView, StateT] = weakref.WeakKeyDictionary()

    def __getitem__(self, row: RowView) -> StateT:
        state = self._states.get(row)
        if state is None:
            state = self._states[row] = self._make(row)
        return state

    def __len__(self) -> int:
        return len(self._states)


def drafter_name(drafter: Drafter) -> str:
    """The name of a drafter in metadata and among those to choose from: its class's, ``reference_copy``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(drafter).__name__).lower()


def require_at_least(least: float, **numbers: float | None) -> None:
    """Check options given by name; raises ``ValueError`` for one below ``least``, unless it is ``None``."""
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")


class Autoregressive:
    """Proposes nothing. Every other drafter must give the same text, token by token."""

    def propose(self, rows: Sequence[RowView]) -> Sequence[Draft]:
        """An empty draft for each row."""
        return [EMPTY_DRAFT] * len(rows)

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""
