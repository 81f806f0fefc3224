"""Jacobi decoding: guess a block, let the model correct all of it at once, guess again from its answer.

The greedy text is the fixed point of this iteration (Santilli et al., arXiv 2305.10427). A plain model
seldom predicts a token correctly after a wrong one; a model trained for consistency (CLLM, arXiv 2403.00835;
Jacobi Forcing, arXiv 2512.14681) gets several tokens accepted per forward. N-grams of past iterates that were
rejected at one position but may fit a little later are tried again as branches beside the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from local_backend.drafting.draft import Draft, Outcome
from local_backend.drafting.drafter import PerRow, RowByRow, RowView, require_at_least

_KEPT_NGRAMS = 8


@dataclass(slots=True)
class _State:
    pool: NgramPool
    guess: list[int] = field(default_factory=list)


class Jacobi(RowByRow):
    """Proposes the last iterate of a block of guesses.

    Args:
        block_size: Number of tokens in the block.
        num_recycled: Number of n-grams of the text and of past iterates to try beside the block.
        ngram_size: Length of these n-grams, including the row's last token.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(self, block_size: int = 16, num_recycled: int = 2, ngram_size: int = 4) -> None:
        require_at_least(1, block_size=block_size)
        require_at_least(0, num_recycled=num_recycled)
        require_at_least(2, ngram_size=ngram_size)
        self.block_size = block_size
        self.num_recycled = num_recycled
        self._states = PerRow(lambda _: _State(NgramPool(ngram_size, _KEPT_NGRAMS)))

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Take the model's tokens at the rejected positions as the next guess."""
        for row, outcome in zip(rows, outcomes, strict=True):
            state = self._states[row]
            iterate = outcome.predictions_along(state.guess)
            state.guess = iterate[len(outcome.token_ids) :]
            state.pool.add(iterate)

    def _draft(self, row: RowView) -> Draft:
        state = self._states[row]
        state.pool.read(row.token_ids)
        room = max(0, row.room - 1)
        last = row.token_ids[-1]
        size = min(self.block_size, room)
        while len(state.guess) < size:
            # Fill the positions beyond the last iterate with n-grams seen before.
            behind = state.guess[-1] if state.guess else last
            state.guess.extend(next(iter(state.pool.after(behind)), (behind,)))
        del state.guess[size:]
        recycled = [Draft.chain(ngram[:room]) for ngram in state.pool.after(last)[: self.num_recycled]]
        return Draft.merged([Draft.chain(state.guess), *recycled])


class NgramPool:
    """The last ``num_kept`` n-grams of ``num_tokens`` tokens seen from each first token on."""

    def __init__(self, num_tokens: int, num_kept: int) -> None:
        self._num_tokens = num_tokens
        self._num_kept = num_kept
        self._continuations: dict[int, dict[tuple[int, ...], None]] = {}  # dicts keep the order of insertion
        self._num_read = 0

    def read(self, text: Sequence[int]) -> None:
        """Add the n-grams of a growing text that are new since the last call."""
        self.add(text[max(0, self._num_read - self._num_tokens + 1) :])
        self._num_read = len(text)

    def add(self, token_ids: Sequence[int]) -> None:
        """Add every n-gram of ``token_ids``."""
        for start in range(len(token_ids) - self._num_tokens + 1):
            continuation = tuple(token_ids[start + 1 : start + self._num_tokens])
            kept = self._continuations.setdefault(token_ids[start], {})
            kept.pop(continuation, None)
            kept[continuation] = None
            if len(kept) > self._num_kept:
                del kept[next(iter(kept))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The continuations of ``token``, the latest first."""
        return list(reversed(self._continuations.get(token, {})))
