"""Guess tokens: tokens a model was trained to guess by, one for each place ahead.

They are nothing it writes. Hung behind the text they are questions: what the model says on them in one
forward becomes the draft of the next, a tree of the likeliest paths (Medusa, arXiv 2401.10774), short where
the model is in doubt, a chain where it is sure. New ones hang from the tokens at which the text may well get
no further, so that there are guesses behind it, none of which was made behind a wrong one. Beside the tree
n-grams of the text are tried again. Everything says what it is worth, so that a draft can be cut to the width
that pays.

Where Jacobi decoding (:mod:`~local_backend.drafters.jacobi`) goes on from what the model said behind guesses
that may be wrong, this asks anew behind what was right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

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
    likely: Draft = EMPTY_DRAFT  # what guess tokens stand for
    recycled: Sequence[Draft] = ()
    recycled_share: _RunningShare = field(
        default_factory=lambda: _RunningShare(_FIRST_SHARE_OF_RECYCLED, _RATE_OF_RECYCLED)
    )


class GuessTokens:
    """Proposes what the model said on guess tokens, and asks on.

    Args:
        token_ids: The guess tokens: for the place after next, the one behind it and so on.
        num_asked: How many of them hang from one token, at most.
        num_recycled: How many n-grams of the text are tried beside what the model said.
        ngram_size: Their length, the row's last token included.
        tree_size: How many tokens of those that guess tokens stand for are drafted.
        least_probability: How likely such a token must be, its path included; of a guess token, how many
            tokens it must be expected to land in the next forward.

    Raises:
        ValueError: There is no guess token, or a number is out of range.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        num_asked: int = 16,
        num_recycled: int = 2,
        ngram_size: int = 4,
        tree_size: int = 8,
        least_probability: float = 0.04,
    ) -> None:
        if not token_ids:
            raise ValueError("there is no guess token: give those the model was trained with, or use Jacobi")
        for name, value, least in (
            ("num_asked", num_asked, 1),
            ("num_recycled", num_recycled, 0),
            ("ngram_size", ngram_size, 2),
            ("tree_size", tree_size, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 <= least_probability < 1:
            raise ValueError(f"least_probability must be at least 0 and less than 1, got {least_probability}")
        self.token_ids = tuple(token_ids)[:num_asked]
        self.num_recycled = num_recycled
        self.tree_size = tree_size
        self.least_probability = least_probability
        self._share = _RunningShare(_FIRST_SHARE_OF_GUESSES, _RATE_OF_GUESSES)
        self._states = PerRow(lambda _: _State(NgramPool(ngram_size, _KEPT_NGRAMS)))

    def propose(self, rows: Sequence[WritingRow]) -> Sequence[Draft]:
        """Each row's guesses, with guess tokens where they may end."""
        return [self.ask(row, draft) for row, draft in zip(rows, self.guess(rows), strict=True)]

    def guess(self, rows: Sequence[WritingRow]) -> Sequence[Draft]:
        """What the model said on each row's guess tokens, and n-grams that begin with its last token."""
        return [self._guess(row) for row in rows]

    def ask(self, row: WritingRow, draft: Draft, *, worth: float = 1.0) -> Draft:
        """A draft, of whatever origin, with guess tokens where it may well end.

        Args:
            row: The draft's.
            draft: It says how likely its tokens are.
            worth: Of what guess tokens land, the share that nobody lands without them.
        """
        room = max(0, row.room - 1)
        asked = self.token_ids[:room]
        worths = [worth * share for share in self._share.at_depths(len(asked))]
        return replace(draft, num_candidates=_NUM_CANDIDATES).with_questions(
            asked, worths, max_depth=room, least_worth=self.least_probability
        )

    def observe(self, rows: Sequence[WritingRow], outcomes: Sequence[Outcome]) -> None:
        """Keep what the model said on the guess tokens behind its last token; the rest was asked in vain."""
        for row, outcome in zip(rows, outcomes, strict=True):
            state = self._states[row]
            self._share.note(state.likely, outcome)
            for draft in state.recycled:
                state.recycled_share.note(draft, outcome)
            said = takewhile(outcome.candidates.__contains__, self.token_ids)
            state.likely = Draft.likeliest_paths(
                [outcome.candidates[token] for token in said],
                max_tokens=self.tree_size,
                least_probability=self.least_probability,
            )

    def _guess(self, row: WritingRow) -> Draft:
        state = self._states[row]
        state.pool.read(row.token_ids)
        room = max(0, row.room - 1)
        state.recycled = [
            Draft.chain(ngram[:room]) for ngram in state.pool.after(row.token_ids[-1])[: self.num_recycled]
        ]
        recycled = [
            replace(draft, probabilities=tuple(state.recycled_share.at_depths(len(draft))))
            for draft in state.recycled
        ]
        likely = state.likely.truncated(max_tokens=self.tree_size, max_depth=room)
        return Draft.merged([likely, *recycled])
