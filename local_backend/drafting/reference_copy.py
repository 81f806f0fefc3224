"""Reference copy: if the row's last tokens occur in a reference, what follows there may follow here.

LLMA (arXiv 2304.04487) copies a span of fixed length after one match. :class:`ReferenceCopy` uses every
match: the candidate continuations of all of them grow into one token tree, so the forward that would have
verified one span verifies the likeliest parts of many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from local_backend.drafting.copy_sources import CopySources
from local_backend.drafting.copy_tree import CopyWeights, Votes, grow
from local_backend.drafting.draft import EMPTY_DRAFT, Draft, Outcome
from local_backend.drafting.drafter import PerRow, RowByRow, RowView, require_at_least
from local_backend.drafting.suffix_index import SharedIndexes, SuffixIndex

FITTED = CopyWeights(
    traits=(0.3, -0.587, 0.453, 0.147, -0.603, 0.352, -0.118, 0.323, 0.306, -0.121, 0.283, 0.261),
    by_length=(-1.555, -0.742, -0.062, 0.144, 0.325, 0.521, 0.614, 0.932),
    miss=(-0.06, 0.658, 0.143, 0.723, -0.072, 0.001, -0.146, -0.123, 0.018, -0.221, -0.261),
    sharpness=1.5,
)
"""The defaults of :class:`~local_backend.drafting.ReferenceCopy`."""

_FIRST_PRICE, _LOWEST_PRICE, _HIGHEST_PRICE = 0.05, 0.002, 0.3
_PRICE_RATE = 0.4
# Prior added to a row's counts of breaks.
_USUAL_BREAKS = 4.0


@dataclass(slots=True)
class _State:
    sources: CopySources
    price: float = _FIRST_PRICE
    # How often copies broke off after the first token of a draft, and how often that was expected.
    num_breaks: float = _USUAL_BREAKS
    num_expected_breaks: float = _USUAL_BREAKS

    @property
    def caution(self) -> float:
        return math.log(self.num_breaks / self.num_expected_breaks)


@dataclass(eq=False, kw_only=True)
class ReferenceCopy(RowByRow):
    """Proposes the likeliest continuations of all positions where the row's last tokens occurred before.

    A token is drafted if its path is accepted with at least a certain probability, the price of a token. The
    price rises while a row's trees are large and falls while they are small. So on average a tree is as large
    as is nearly free to verify, and trees are largest where they promise the most accepted tokens.

    Args:
        mean_draft_tokens: Maximum average size of a token tree.
        max_draft_tokens: Maximum size of one token tree; 63, because with the row's last token that is the
            widest forward whose cost is measured.
        max_depth: Maximum tokens on one path.
        weights: Weights of the sources' votes.

    Raises:
        ValueError: A number is out of range.
    """

    mean_draft_tokens: float = 32
    max_draft_tokens: int = 63
    max_depth: int = 63
    weights: CopyWeights = FITTED

    def __post_init__(self) -> None:
        require_at_least(1, mean_draft_tokens=self.mean_draft_tokens, max_depth=self.max_depth)
        require_at_least(1, max_draft_tokens=self.max_draft_tokens)
        self._indexes = SharedIndexes()
        self._states = PerRow(self._begin)

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Learn for each row whether its copies break off sooner or later than expected."""
        for row, outcome in zip(rows, outcomes, strict=True):
            draft = outcome.draft
            if not (outcome.accepted and draft.probabilities):
                continue
            state = self._states[row]
            going_on: dict[int, float] = {}
            for parent, probability in zip(draft.parents, draft.probabilities, strict=True):
                going_on[parent] = going_on.get(parent, 0.0) + probability
            for number, node in enumerate(outcome.accepted):
                if node in going_on:
                    # In a merged draft, a token's children can sum to a higher probability than the token.
                    going_on_share = min(1.0, going_on[node] / max(draft.probabilities[node], 1e-9))
                    state.num_expected_breaks += 1 - going_on_share
                    state.num_breaks += number + 1 == len(outcome.accepted)

    def _begin(self, row: RowView) -> _State:
        prompt = SuffixIndex([row.token_ids[: row.num_prompt_tokens]])
        return _State(CopySources(self._indexes.of(row.references), prompt))

    def _draft(self, row: RowView) -> Draft:
        max_depth = min(self.max_depth, row.room - 1)
        if max_depth < 1:
            return EMPTY_DRAFT
        state = self._states[row]
        sources = state.sources
        sources.extend(row.token_ids, row.num_prompt_tokens)
        draft = grow(
            sources(row.token_ids),
            Votes(self.weights, deviation=sources.deviation, caution=state.caution),
            max_tokens=self.max_draft_tokens,
            max_depth=max_depth,
            min_probability=state.price,
        )
        excess = (len(draft) - self.mean_draft_tokens) / self.mean_draft_tokens
        state.price = min(_HIGHEST_PRICE, max(_LOWEST_PRICE, state.price * math.exp(_PRICE_RATE * excess)))
        return draft
