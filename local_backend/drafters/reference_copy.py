"""Reference copy: what was written last occurs in a reference, so what follows there may follow here.

LLMA (arXiv 2304.04487) copies a span of fixed length behind one match, and so does
:mod:`~local_backend.drafters.span_copy`. Here every match is heard: the candidate continuations of all of
them grow into one token tree, so that the forward that would have verified one span verifies the likeliest
parts of many.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from local_backend.draft import EMPTY_DRAFT, Draft, Outcome
from local_backend.drafters.base import WritingRow
from local_backend.drafters.copy_tree import Source, grow
from local_backend.drafters.per_row import PerRow
from local_backend.drafters.reference_index import ReferenceIndex

# A match of so many tokens counts as copied from its reference, which is then trusted more.
_COPIED_TOKENS = 3
_TRUST_IN_COPIED = 0.3
# Without a match only the beginnings of references are left to guess; this much is asked of them when the
# answer begins, where many do begin like a document, and later on, where few sentences do.
_MIN_PROBABILITY_OF_BEGINNING, _MIN_PROBABILITY_WITHOUT_MATCH = 0.05, 0.2


@dataclass(slots=True)
class _State:
    index: ReferenceIndex
    # Per reference how many tokens were copied from it, shared where several hold the same.
    num_copied: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))


class ReferenceCopy:
    """Proposes the likeliest continuations of all places at which the row's last tokens occurred before.

    Args:
        max_draft_tokens: Size of the token tree, at most.
        max_depth: Tokens on one path, at most.
        min_probability: A token is drafted only if its path is accepted with at least this probability.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self, *, max_draft_tokens: int = 20, max_depth: int = 24, min_probability: float = 0.01
    ) -> None:
        for name, value in (("max_draft_tokens", max_draft_tokens), ("max_depth", max_depth)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < min_probability < 1:
            raise ValueError(f"min_probability must be between 0 and 1, got {min_probability}")
        self.max_draft_tokens = max_draft_tokens
        self.max_depth = max_depth
        self.min_probability = min_probability
        self._states = PerRow(lambda row: _State(ReferenceIndex(row.references, row.token_ids)))

    def propose(self, rows: Sequence[WritingRow]) -> Sequence[Draft]:
        """One tree for each row; nothing where nothing is likely enough."""
        return [self._draft(row) for row in rows]

    def observe(self, rows: Sequence[WritingRow], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn that the row's own text does not say."""

    def _draft(self, row: WritingRow) -> Draft:
        max_depth = min(self.max_depth, row.room - 1)
        if max_depth < 1:
            return EMPTY_DRAFT
        state = self._states[row]
        for token in row.token_ids[state.index.num_own_tokens :]:
            state.index.extend([token])
            self._note_copied(state)
        sources = list(self._sources(state))
        min_probability = self.min_probability
        begins = len(row.token_ids) == row.num_prompt_tokens
        if begins or not sources:
            sources += [Source(start, 0) for start in state.index.reference_starts]
            min_probability = _MIN_PROBABILITY_OF_BEGINNING if begins else _MIN_PROBABILITY_WITHOUT_MATCH
        return grow(
            sources,
            state.index.token_at,
            max_tokens=self.max_draft_tokens,
            max_depth=max_depth,
            min_probability=min_probability,
        )

    @staticmethod
    def _sources(state: _State) -> Iterator[Source]:
        for match in state.index.matches():
            reference = state.index.reference_of(match.end)
            copied = 0.0 if reference is None else state.num_copied[reference]
            yield Source(match.end, match.num_tokens, 1 + _TRUST_IN_COPIED * math.log1p(copied))

    @staticmethod
    def _note_copied(state: _State) -> None:
        longest, holders = 0, set[int]()
        for match in state.index.matches(_COPIED_TOKENS):
            reference = state.index.reference_of(match.end)
            if reference is None or match.num_tokens < longest:
                continue
            if match.num_tokens > longest:
                longest, holders = match.num_tokens, set()
            holders.add(reference)
        for reference in holders:
            state.num_copied[reference] += 1 / len(holders)
