"""Jacobi decoding: guess a block, let the model correct all of it at once, guess again from what it said.

The greedy text is the fixed point of this iteration (Santilli et al., arXiv 2305.10427). A plain model
seldom gets a token right behind a wrong one; a model trained for consistency (CLLM, arXiv 2403.00835; Jacobi
Forcing, arXiv 2512.14681) lands several tokens a forward. N-grams of past iterates that were refused where
they stood, but belong a little further on, are tried again as branches beside the block.

A model may have been trained to begin blocks with guess tokens of its own, one for each place ahead. What it
takes for likely on them becomes a tree of the likeliest paths (Medusa, arXiv 2401.10774): short where it is
in doubt, a chain where it is sure. New ones hang from the tokens at which the text may well get no further,
so that there are guesses behind it, none of which was made behind a wrong one. Such a block says what each of
its tokens is worth, and is cut to the width that pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from local_backend.draft import EMPTY_DRAFT, Draft, Outcome
from local_backend.drafters.base import WritingRow
from local_backend.drafters.ngram_pool import NgramPool
from local_backend.drafters.per_row import PerRow

_KEPT_NGRAMS = 8
_NUM_CANDIDATES = 4  # of one place; the fifth is next to never in the tree
# How often a token behind a right one is right: what is taken for true at first, and how fast that is left.
_FIRST_SHARE_OF_GUESSES, _RATE_OF_GUESSES = 0.75, 0.02  # of all rows: it is a matter of the model
_FIRST_SHARE_OF_RECYCLED, _RATE_OF_RECYCLED = 0.4, 0.1  # of one row: it is a matter of what it quotes


@dataclass(slots=True)
class _RunningShare:
    """How often a drafted token is right where the one before it was, lately: running means of both."""

    num_right: float  # of one tried, at first
    rate: float
    num_tried: float = 1.0

    def note(self, draft: Draft, outcome: Outcome) -> None:
        """Learn from what was written, whether or not all of the draft was verified."""
        if len(draft):
            right = len(draft.places_along(outcome.token_ids))
            tried = min(right + 1, max(draft.depths()), len(outcome.token_ids))
            self.num_right += self.rate * (right - self.num_right)
            self.num_tried += self.rate * (tried - self.num_tried)

    def at_depths(self, count: int) -> list[float]:
        """How likely the first token is right, the first two, and so on."""
        return [(self.num_right / self.num_tried) ** depth for depth in range(1, count + 1)]


@dataclass(slots=True)
class _State:
    pool: NgramPool
    guess: list[int] = field(default_factory=list)
    likely: Draft = EMPTY_DRAFT  # what guess tokens stand for
    recycled: Sequence[Draft] = ()
    recycled_share: _RunningShare = field(
        default_factory=lambda: _RunningShare(_FIRST_SHARE_OF_RECYCLED, _RATE_OF_RECYCLED)
    )


class Jacobi:
    """Proposes the last iterate of a block of guesses.

    Args:
        block_size: Guessed tokens in flight.
        num_recycled: How many n-grams of the text and of past iterates are tried beside the block.
        ngram_size: Their length, the row's last token included.
        guess_token_ids: The tokens by which the model was trained to guess the place after next, the one
            behind it and so on; they are nothing it writes. Without them blocks begin with n-grams seen
            before.
        tree_size: How many tokens of those that guess tokens stand for are drafted.
        least_probability: How likely such a token must be, its path included; of a guess token, how many
            tokens it must be expected to land in the next forward.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        block_size: int = 16,
        num_recycled: int = 2,
        ngram_size: int = 4,
        *,
        guess_token_ids: Sequence[int] = (),
        tree_size: int = 8,
        least_probability: float = 0.04,
    ) -> None:
        for name, value, least in (
            ("block_size", block_size, 1),
            ("num_recycled", num_recycled, 0),
            ("ngram_size", ngram_size, 2),
            ("tree_size", tree_size, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 <= least_probability < 1:
            raise ValueError(f"least_probability must be at least 0 and less than 1, got {least_probability}")
        self.block_size = block_size
        self.num_recycled = num_recycled
        self.ngram_size = ngram_size
        self.guess_token_ids = tuple(guess_token_ids)
        self.tree_size = tree_size
        self.least_probability = least_probability
        self._guesses_share = _RunningShare(_FIRST_SHARE_OF_GUESSES, _RATE_OF_GUESSES)
        self._states = PerRow(lambda _: _State(NgramPool(ngram_size, _KEPT_NGRAMS)))

    def propose(self, rows: Sequence[WritingRow]) -> Sequence[Draft]:
        """Each row's block, and beside it recycled n-grams that begin with its last token."""
        return [self._draft(row) for row in rows]

    def observe(self, rows: Sequence[WritingRow], outcomes: Sequence[Outcome]) -> None:
        """The model's tokens at the refused places are the next guess, or those it said on guess tokens."""
        for row, outcome in zip(rows, outcomes, strict=True):
            state = self._states[row]
            if self.guess_token_ids:
                self._guesses_share.note(state.likely, outcome)
                for draft in state.recycled:
                    state.recycled_share.note(draft, outcome)
                state.likely = self._said_on_guess_tokens(outcome)
            else:
                iterate = outcome.predictions_along(state.guess)
                state.guess = iterate[len(outcome.token_ids) :]
                state.pool.add(iterate)

    def _said_on_guess_tokens(self, outcome: Outcome) -> Draft:
        """What the guess tokens behind the last accepted token stand for, where there are any."""
        if not outcome.candidates:
            return EMPTY_DRAFT
        places = outcome.draft.children_of(outcome.accepted[-1] if outcome.accepted else -1)
        said = []
        for token in self.guess_token_ids[: self.block_size]:
            if token not in places:
                break
            said.append(outcome.candidates[places[token] + 1])
        return Draft.likeliest_paths(
            said, max_tokens=self.tree_size, least_probability=self.least_probability
        )

    def _draft(self, row: WritingRow) -> Draft:
        state = self._states[row]
        state.pool.read(row.token_ids)
        room = max(0, row.room - 1)
        last = row.token_ids[-1]
        size = min(self.block_size, room)
        recycled = [Draft.chain(ngram[:room]) for ngram in state.pool.after(last)[: self.num_recycled]]
        if self.guess_token_ids:
            state.recycled = recycled
            return self._tree(state, size, room)
        while len(state.guess) < size:
            behind = state.guess[-1] if state.guess else last
            state.guess.extend(next(iter(state.pool.after(behind)), (behind,)))
        del state.guess[size:]
        return Draft.merged([Draft.chain(state.guess), *recycled])

    def _tree(self, state: _State, size: int, room: int) -> Draft:
        """What guess tokens stood for and what is recycled, with guess tokens where it may end."""
        likely = state.likely.truncated(max_tokens=self.tree_size, max_depth=size)
        recycled = [
            replace(draft, probabilities=tuple(state.recycled_share.at_depths(len(draft))))
            for draft in state.recycled
        ]
        tree = replace(Draft.merged([likely, *recycled]), num_candidates=_NUM_CANDIDATES)
        asked = self.guess_token_ids[:size]
        return tree.with_questions(
            asked,
            self._guesses_share.at_depths(len(asked)),
            max_depth=room,
            least_worth=self.least_probability,
        )
