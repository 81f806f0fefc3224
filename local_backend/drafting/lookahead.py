"""Lookahead decoding: a window of Jacobi iterates breeds n-grams; those that fit are verified beside it.

After arXiv 2402.02057. The window keeps the last ``ngram_size - 1`` iterates of ``window_size`` places. A
cell of an older iterate stands one place before the cell of the next one that it gave rise to, so the cells
of one diagonal and the model's token behind them are an n-gram of the model's own making. The mask of the
paper, in which a cell sees the oldest iterate up to its diagonal and then its diagonal, is that of a token
tree: a chain (the oldest iterate) with a twig (the rest of the diagonal) at each of its tokens. So window
and guesses are one draft, and any cell the model agrees with is accepted like a guess.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from local_backend.drafting.draft import Draft, Outcome
from local_backend.drafting.drafter import PerRow, RowView
from local_backend.drafting.jacobi import NgramPool

# N-grams of references are read row by row; copying long ones is what reference copy is for.
_MAX_REFERENCE_TOKENS = 4096


@dataclass(slots=True)
class _State:
    pool: NgramPool
    rng: random.Random
    window: list[list[int]]  # [iterate, place]: the oldest first

    def path(self, place: int) -> list[int]:
        """Tokens from the root to the end of the diagonal at ``place`` of the oldest iterate."""
        return self.window[0][:place] + self.diagonal(place)

    def diagonal(self, place: int) -> list[int]:
        return [iterate[place] for iterate in self.window]


class Lookahead:
    """Proposes n-grams that begin with the row's last token, and a window that breeds more.

    Args:
        window_size: Places of the window (W).
        ngram_size: Tokens of an n-gram, its first included (N); the window keeps one iterate less.
        num_guesses: N-grams verified in a forward, at most (G).

    The defaults draft 16 tokens, which a small model on a CPU verifies in about the time of one.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(self, window_size: int = 5, ngram_size: int = 3, num_guesses: int = 3) -> None:
        for name, value, least in (
            ("window_size", window_size, 1),
            ("ngram_size", ngram_size, 2),
            ("num_guesses", num_guesses, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.window_size = window_size
        self.ngram_size = ngram_size
        self.num_guesses = num_guesses
        self._states = PerRow(self._begin)

    def propose(self, rows: Sequence[RowView]) -> Sequence[Draft]:
        """Each row's guesses, then its window, as one tree."""
        return [self._draft(row) for row in rows]

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Collect the n-grams the window gave rise to, and move it on by one iterate."""
        for row, outcome in zip(rows, outcomes, strict=True):
            state = self._states[row]
            newest = []
            for place in range(self.window_size):
                path = state.path(place)
                predictions = outcome.predictions_along(path)
                if len(predictions) == len(path) + 1:
                    newest.append(predictions[-1])
                    state.pool.add([*state.diagonal(place), predictions[-1]])
                else:  # the draft was cut before this cell
                    newest.append(state.rng.choice(row.token_ids))
            # The oldest iterate leaves, which moves every cell one place on; the row may have moved further.
            num_passed = min(len(outcome.token_ids) - 1, self.window_size)
            state.window = [
                iterate[num_passed:] + self._fresh(row, state.rng, num_passed)
                for iterate in [*state.window[1:], newest]
            ]

    def _begin(self, row: RowView) -> _State:
        rng = random.Random(0)
        window = [self._fresh(row, rng, self.window_size) for _ in range(self.ngram_size - 1)]
        pool = NgramPool(self.ngram_size, self.num_guesses)
        left = _MAX_REFERENCE_TOKENS
        for reference in row.references:
            pool.add(reference[: max(0, left)])
            left -= len(reference)
        return _State(pool, rng, window)

    def _draft(self, row: RowView) -> Draft:
        state = self._states[row]
        state.pool.read(row.token_ids)
        paths = [*state.pool.after(row.token_ids[-1]), *map(state.path, range(self.window_size))]
        return Draft.merged(Draft.chain(path[: max(0, row.room - 1)]) for path in paths)

    @staticmethod
    def _fresh(row: RowView, rng: random.Random, count: int) -> list[int]:
        """Cells of which nothing is known begin as tokens of the row's text."""
        return rng.choices(row.token_ids, k=count)
