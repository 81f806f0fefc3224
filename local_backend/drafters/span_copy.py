"""Span copy: behind the longest match of what was written last, a span of fixed length.

After LLMA (arXiv 2304.04487): the trigger is a match of n tokens, the copy k tokens long. Where LLMA takes
the first match, this takes the longest, and prompt and own text are searched behind the references.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from local_backend.draft import EMPTY_DRAFT, Draft, Outcome
from local_backend.drafters.base import WritingRow
from local_backend.drafters.per_row import PerRow
from local_backend.drafters.shared_indexes import SharedIndexes
from local_backend.drafters.text_index import BORDER, Match, TextIndex
from local_backend.drafters.written_text import WrittenText


@dataclass(slots=True)
class _State:
    references: TextIndex
    prompt: TextIndex
    written: WrittenText


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
        self._indexes = SharedIndexes()
        self._states = PerRow(self._begin)

    def propose(self, rows: Sequence[WritingRow]) -> Sequence[Draft]:
        """The copy behind each row's best match; nothing where there is no match."""
        return [self._draft(row) for row in rows]

    def observe(self, rows: Sequence[WritingRow], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn that the row's own text does not say."""

    def _begin(self, row: WritingRow) -> _State:
        prompt = TextIndex([row.token_ids[: row.num_prompt_tokens]])
        return _State(self._indexes.of(row.references), prompt, WrittenText())

    def _draft(self, row: WritingRow) -> Draft:
        num_tokens = min(self.num_copy_tokens, row.room - 1)
        state, text = self._states[row], row.token_ids
        state.written.extend(text[row.num_prompt_tokens + len(state.written.tokens) :])
        # Of equally long matches that in a reference, then that in the row's own text.
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
        span = list(tokens[best.place : best.place + num_tokens])
        if BORDER in span:
            del span[span.index(BORDER) :]
        if tokens is state.written.tokens or (tokens is state.prompt.tokens and not state.written.tokens):
            # A copy that reaches the last written token goes on with itself, as a repetition would.
            period = len(span)
            while len(span) < num_tokens:
                span.append(span[len(span) - period])
        return Draft.chain(span)
