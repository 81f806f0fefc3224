"""What a drafter is: it proposes drafts and observes what became of them. And the one that proposes nothing.

Knows drafts and outcomes. Does not know the engine, the model or the cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from local_backend.drafting.draft import EMPTY_DRAFT, Draft, Outcome


class RowView(Protocol):
    """What a drafter sees of a row: one object throughout, equal to no other, weakly referable."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and everything emitted."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def references(self) -> Sequence[Sequence[int]]:
        """Token ids of text that may be copied."""

    @property
    def room(self) -> int:
        """How many more tokens the row may emit; a deeper draft is cut."""


@runtime_checkable
class Drafter(Protocol):
    """A way of guessing what rows will write next.

    Whatever it proposes, the text stays the model's own: a wrong draft costs time and nothing else.
    """

    def propose(self, rows: Sequence[RowView]) -> Sequence[Draft]:
        """One draft for each row, possibly empty, in the order of ``rows``."""

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """What became of the drafts last proposed for ``rows``, whose ``token_ids`` have grown by it.

        A row may have ended with it, and a row may end without a word: keep what is known of one in
        :class:`~local_backend.drafting.drafter.PerRow`.
        """


StateT = TypeVar("StateT")


class PerRow(Generic[StateT]):
    """One state for each row, made when first asked for and dropped with the row.

    Args:
        make: The state of a row not seen before. It must not refer to the row, or neither is ever dropped.
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


class Autoregressive:
    """Proposes nothing. What every other drafter must agree with, token by token."""

    def propose(self, rows: Sequence[RowView]) -> Sequence[Draft]:
        """An empty draft for each row."""
        return [EMPTY_DRAFT] * len(rows)

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""
