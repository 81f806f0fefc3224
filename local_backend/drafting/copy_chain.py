"""Reference copy for engines that verify chains: of all continuations the likeliest one.

The next token is the one with the most votes of :mod:`~local_backend.drafting.copy_tree`, then the likeliest
behind it, and so on. How often it is accepted depends on the model: a model that quotes goes on once it has
quoted three words, one that tells in its own words does not. So the votes' probability is corrected by what
was accepted so far, in all rows: one offset to its log odds for each class of match length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from local_backend.drafting.copy_sources import CopySources
from local_backend.drafting.copy_tree import Votes, length_class
from local_backend.drafting.draft import EMPTY_DRAFT, Draft, Outcome
from local_backend.drafting.drafter import PerRow, RowByRow, RowView, require_at_least
from local_backend.drafting.reference_copy import FITTED
from local_backend.drafting.suffix_index import SharedIndexes, SuffixIndex

_NUM_CLASSES = len(FITTED.by_length)
# Of the offsets: one wrong guess of something certain lowers its log odds by so much.
_LEARNING_RATE = 0.3
_LARGEST_LOG_ODDS = 12.0
# A copy that is right has a longer match in the next step, which then knows more for its tokens. So after a
# match of n tokens at most this share of n, divided by the probability that a token must have, go on.
_GOES_ON = 0.5


@dataclass(frozen=True, slots=True)
class _Guess:
    token: int
    length_class: int
    probability: float  # given that the guesses before it are right


@dataclass(slots=True)
class _State:
    sources: CopySources
    # The last draft, and the guess behind it: the bonus token tells whether that would have been right.
    guesses: list[_Guess] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class CopyChain(RowByRow):
    """Proposes the likeliest copy of what a row may quote, as a chain.

    Attributes:
        max_draft_tokens: Maximum tokens of a draft.
        min_probability: A token is drafted if it is accepted with at least this probability, all before it
            included. May be changed at any time.
        earlier: Token ids of texts that rows which begin now may quote beside their prompt and references,
            such as earlier answers. May be changed at any time, as a whole.

    Raises:
        ValueError: A number is out of range.
    """

    max_draft_tokens: int = 24
    min_probability: float = 0.1
    earlier: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        require_at_least(1, max_draft_tokens=self.max_draft_tokens)
        self._indexes = SharedIndexes()
        self._states = PerRow(self._begin)
        self._offsets = [0.0] * _NUM_CLASSES

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Learn how often guesses are right."""
        for row, outcome in zip(rows, outcomes, strict=True):
            state = self._states[row]
            for guess, token in zip(state.guesses, outcome.token_ids, strict=False):
                is_right = guess.token == token
                self._offsets[guess.length_class] += _LEARNING_RATE * (is_right - guess.probability)
                if not is_right:
                    break
            state.guesses = []

    def _begin(self, row: RowView) -> _State:
        prompt = SuffixIndex([row.token_ids[: row.num_prompt_tokens]])
        earlier = self._indexes.of(self.earlier) if self.earlier else None
        return _State(CopySources(self._indexes.of(row.references), prompt, earlier))

    def _draft(self, row: RowView) -> Draft:
        max_depth = min(self.max_draft_tokens, row.room - 1)
        if max_depth < 1:
            return EMPTY_DRAFT
        state = self._states[row]
        sources, state.guesses = state.sources, []
        sources.extend(row.token_ids, row.num_prompt_tokens)
        votes = Votes(FITTED, deviation=sources.deviation)
        voters = votes.weigh(sources(row.token_ids))
        probability, probabilities = 1.0, []
        for depth in range(max_depth):
            shares, groups = votes.count(voters, depth)
            if not shares:
                break
            token = max(shares, key=shares.__getitem__)
            voters = groups[token]
            longest = max(num_tokens for _, _, num_tokens, _ in voters)
            if not depth:
                max_goes_on = longest * _GOES_ON / self.min_probability
            elif depth > max_goes_on:
                break
            match = length_class(depth + longest)
            state.guesses.append(_Guess(token, match, self._corrected(shares[token], match)))
            probability *= state.guesses[-1].probability
            if probability < self.min_probability:
                break
            probabilities.append(probability)
        token_ids = tuple(guess.token for guess in state.guesses[: len(probabilities)])
        return Draft(token_ids, tuple(range(-1, len(token_ids) - 1)), tuple(probabilities))

    def _corrected(self, share: float, match: int) -> float:
        log_odds = math.log(max(share, 1e-9) / max(1 - share, 1e-9)) + self._offsets[match]
        return 1 / (1 + math.exp(-max(-_LARGEST_LOG_ODDS, min(_LARGEST_LOG_ODDS, log_odds))))
