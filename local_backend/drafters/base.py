"""What a drafter is: it proposes drafts and observes what became of them.

Knows drafts and outcomes. Does not know the engine, the model or the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from local_backend.draft import Draft, Outcome


class WritingRow(Protocol):
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

    def propose(self, rows: Sequence[WritingRow]) -> Sequence[Draft]:
        """One draft for each row, possibly empty, in the order of ``rows``."""

    def observe(self, rows: Sequence[WritingRow], outcomes: Sequence[Outcome]) -> None:
        """What became of the drafts last proposed for ``rows``, whose ``token_ids`` have grown by it.

        A row may have ended with it, and a row may end without a word: keep what is known of one in
        :class:`~local_backend.drafters.per_row.PerRow`.
        """
