"""Span copy: behind the longest match of what was written last, a span of fixed length.

After LLMA (arXiv 2304.04487): the trigger is a match of n tokens, the copy k tokens long. Where LLMA takes
the first match, this takes the longest, and prompt and own text are searched behind the references.
"""

from __future__ import annotations

from collections.abc import Sequence

from local_backend.draft import EMPTY_DRAFT, Draft, Outcome
from local_backend.drafters.base import WritingRow
from local_backend.drafters.per_row import PerRow
from local_backend.drafters.reference_index import Match, ReferenceIndex


class SpanCopy:
    """Proposes the tokens behind the longest match of the row's last tokens.

    Args:
        min_match_tokens: How many last tokens must occur in a text for it to be copied (LLMA's n).
        num_copy_tokens: How many tokens to copy, at most (LLMA's k).

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(self, min_match_tokens: int = 1, num_copy_tokens: int = 20) -> None:
        for name, value in (("min_match_tokens", min_match_tokens), ("num_copy_tokens", num_copy_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.min_match_tokens = min_match_tokens
        self.num_copy_tokens = num_copy_tokens
        self._indexes = PerRow(lambda row: ReferenceIndex(row.references, row.token_ids))

    def propose(self, rows: Sequence[WritingRow]) -> Sequence[Draft]:
        """The copy behind each row's best match; nothing where there is no match."""
        return [self._draft(row) for row in rows]

    def observe(self, rows: Sequence[WritingRow], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn that the row's own text does not say."""

    def _draft(self, row: WritingRow) -> Draft:
        num_tokens = min(self.num_copy_tokens, row.room - 1)
        index = self._indexes[row]
        index.extend(row.token_ids[index.num_own_tokens :])
        best = max(index.matches(self.min_match_tokens), key=_preference, default=None)
        if best is None or num_tokens < 1:
            return EMPTY_DRAFT
        return Draft.chain(index.continuation(best, num_tokens))


def _preference(match: Match) -> tuple[int, bool, int]:
    """The longest; of equals one in a reference; of those the first reference's, but the latest own text."""
    return match.num_tokens, match.is_reference, -match.end if match.is_reference else match.end
