"""Whatever rows do, each holds what was committed to it, and the memory stays within its limit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from local_backend.caching.kv_cache import RaggedKVCache

NUM_LAYERS, HEADS, SIZE = 2, 2, 3
BYTES_PER_TOKEN = 4 * 2 * NUM_LAYERS * HEADS * SIZE


class Rows:
    """A cache, and beside it what every row should hold: per layer keys ``[heads, tokens, size]``."""

    def __init__(self, max_tokens: int | None) -> None:
        self.cache = RaggedKVCache(NUM_LAYERS, max_rows=6, max_prefix_bytes=0, max_tokens=max_tokens)
        self.max_tokens = max_tokens
        self.rows: list[list[Tensor]] = []

    def fits(self, num_rows: int, num_columns: int) -> bool:
        return num_rows <= 6 and self.cache.fits(num_rows, num_columns)

    @property
    def longest(self) -> int:
        return max(self.cache.lengths, default=0)

    def add(self) -> None:
        if self.fits(len(self.rows) + 1, max(1, self.longest)):
            assert self.cache.add_row() == len(self.rows)
            self.rows.append([torch.empty(HEADS, 0, SIZE) for _ in range(NUM_LAYERS)])

    def write(self, rng: random.Random) -> None:
        width = rng.randrange(1, 5)
        if not self.rows or not self.fits(len(self.rows), self.longest + width):
            return
        self.cache.begin_forward(0, len(self.rows), width)
        new = [torch.randn(len(self.rows), HEADS, width, SIZE) for _ in range(NUM_LAYERS)]
        for layer, states in zip(self.cache.layers, new, strict=True):
            layer.update(states, -states)
        for row in range(len(self.rows)):
            kept = sorted(rng.sample(range(width), rng.randrange(width + 1)))
            self.cache.commit(row, kept)
            self.rows[row] = [
                torch.cat([held, states[row, :, kept]], 1)
                for held, states in zip(self.rows[row], new, strict=True)
            ]

    def swap(self, rng: random.Random) -> None:
        if self.rows:
            one, other = rng.randrange(len(self.rows)), rng.randrange(len(self.rows))
            self.cache.swap_rows(one, other)
            self.rows[one], self.rows[other] = self.rows[other], self.rows[one]

    def remove(self, rng: random.Random) -> None:
        if self.rows:
            row = rng.randrange(len(self.rows))
            self.cache.copy_row(len(self.rows) - 1, row, self.cache.lengths[-1])
            self.rows[row] = self.rows[-1]
            self.rows.pop()
            self.cache.remove_last_row()

    def check(self) -> None:
        assert list(self.cache.lengths) == [row[0].shape[1] for row in self.rows]
        for number, row in enumerate(self.rows):
            for layer, held in zip(self.cache.layers, row, strict=True):
                if held.shape[1]:
                    assert layer.keys is not None
                    assert layer.values is not None
                    assert torch.equal(layer.keys[number, :, : held.shape[1]], held)
                    assert torch.equal(layer.values[number, :, : held.shape[1]], -held)
        if self.max_tokens is not None:
            assert self.cache.num_bytes in (0, self.max_tokens * BYTES_PER_TOKEN)


@pytest.mark.parametrize("max_tokens", [None, 40, 61])
@pytest.mark.parametrize("seed", range(4))
def test_rows_hold_what_was_committed(max_tokens: int | None, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = Rows(max_tokens)
    for _ in range(200):
        what = rng.choice(["add", "add", "write", "write", "write", "swap", "remove"])
        if what == "add":
            rows.cache.expected_length = rng.randrange(20)
            rows.add()
        else:
            getattr(rows, what)(rng)
        rows.check()


def test_what_does_not_fit_is_named() -> None:
    cache = RaggedKVCache(NUM_LAYERS, max_rows=6, max_tokens=40)
    cache.add_row()
    with pytest.raises(ValueError, match="1 rows of 41 tokens are more than the 40 tokens"):
        cache.begin_forward(0, 1, 41)
    for _ in range(5):
        cache.add_row()
    with pytest.raises(ValueError, match="all 6 rows are in use"):
        cache.add_row()
    assert cache.lengths == [0] * 6
    with pytest.raises(ValueError, match="6 rows of 7 tokens"):
        cache.begin_forward(0, 6, 7)
