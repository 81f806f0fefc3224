"""The fixed-span reference copy of LLMA (arXiv 2304.04487), which ``reference_copy`` is measured against.

The longest match of a row's last tokens is copied, always the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from local_backend import Draft, Outcome
from local_backend.drafting.draft import EMPTY_DRAFT
from local_backend.drafting.drafter import PerRow, RowView, require_at_least
from local_backend.drafting.suffix_index import BORDER, GrowingIndex, Match, SharedIndexes, SuffixIndex


@dataclass(slots=True)
class _SpanState:
    references: SuffixIndex
    prompt: SuffixIndex
    written: GrowingIndex


class SpanCopy:
    """Proposes the tokens after the longest match of the row's last tokens.

    Args:
        min_match_tokens: Minimum length of a match (LLMA's n).
        num_copy_tokens: Maximum number of tokens to copy (LLMA's k).

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(self, min_match_tokens: int = 1, num_copy_tokens: int = 20) -> None:
        require_at_least(1, min_match_tokens=min_match_tokens, num_copy_tokens=num_copy_tokens)
        self.min_match_tokens = min_match_tokens
        self.num_copy_tokens = num_copy_tokens
        self._indexes = SharedIndexes()
        self._states = PerRow(self._begin)

    def propose(self, rows: Sequence[RowView]) -> Sequence[Draft]:
        """The copy after each row's longest match; empty if there is no match."""
        return [self._draft(row) for row in rows]

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn beyond the row's own text."""

    def _begin(self, row: RowView) -> _SpanState:
        prompt = SuffixIndex([row.token_ids[: row.num_prompt_tokens]])
        return _SpanState(self._indexes.of(row.references), prompt, GrowingIndex())

    def _draft(self, row: RowView) -> Draft:
        num_tokens = min(self.num_copy_tokens, row.room - 1)
        state, text = self._states[row], row.token_ids
        state.written.extend(text[row.num_prompt_tokens + len(state.written.tokens) :])
        # Of equally long matches, references come first, then the emitted text.
        sources: tuple[tuple[Sequence[int], Match | None], ...] = (
            (state.references.tokens, state.references.longest(text)),
            (state.written.tokens, next(iter(state.written.matches(limit=1)), None)),
            (state.prompt.tokens, state.prompt.longest(text)),
        )
        best = Match(0, 0)
        tokens: Sequence[int] = state.references.tokens
        for candidate_tokens, match in sources:
            if match is not None and match.num_tokens > best.num_tokens:
                best, tokens = match, candidate_tokens
        if best.num_tokens < self.min_match_tokens or num_tokens < 1:
            return EMPTY_DRAFT
        span = list(tokens[best.index : best.index + num_tokens])
        if BORDER in span:
            del span[span.index(BORDER) :]
        if tokens is state.written.tokens or (tokens is state.prompt.tokens and not state.written.tokens):
            # A copy that reaches the row's last token continues with itself, as a repetition would.
            period = len(span)
            while len(span) < num_tokens:
                span.append(span[len(span) - period])
        return Draft.chain(span)
