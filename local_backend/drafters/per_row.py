"""What a drafter knows of each row, gone when the row is gone, however it ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from local_backend.drafters.base import WritingRow

StateT = TypeVar("StateT")


class PerRow(Generic[StateT]):
    """One state for each row, made when first asked for and dropped with the row.

    Args:
        make: The state of a row not seen before. It must not refer to the row, or neither is ever dropped.
    """

    def __init__(self, make: Callable[[WritingRow], StateT]) -> None:
        self._make = make
        self._states: weakref.WeakKeyDictionary[WritingRow, StateT] = weakref.WeakKeyDictionary()

    def __getitem__(self, row: WritingRow) -> StateT:
        state = self._states.get(row)
        if state is None:
            state = self._states[row] = self._make(row)
        return state

    def __len__(self) -> int:
        return len(self._states)
