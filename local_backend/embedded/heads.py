"""Attention heads that are written by hand: what they compare, how they mind distance, what they carry.

Knows the layout of ``transformers``' Llama: heads stand side by side in the rows of the projections, and the
rotary embedding turns coordinate ``i`` of a head together with coordinate ``i + head_size / 2``. Does not
know what a head is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from local_backend.embedded.stream import (
    CONSTANT_AT,
    CONSTANT_READ,
    HEAD_SIZE,
    NOTHING_AT,
    NOTHING_READ,
    READ,
)

NUM_FAST = 9  # rotary pairs that tell distances; those behind them compare contents at any distance
FARTHEST = 600  # tokens over which distances are told
HALF = HEAD_SIZE // 2
ASKED = 200.0  # by how much a query that is not asked prefers nothing
_SLOW = range(NUM_FAST, HALF)
# Rows of queries and keys whose products hardly depend on the distance: both coordinates of each slow pair.
STILL = (*_SLOW, *(pair + HALF for pair in _SLOW))


class Head:
    """One head, emptied, to be written into: what it compares, how it minds distance, what it carries."""

    def __init__(self, attention: Any, number: int) -> None:
        self._attention = attention
        self._first = self._next_value = number * HEAD_SIZE
        rows = slice(self._first, self._first + HEAD_SIZE)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight[rows] = 0.0
        attention.o_proj.weight[:, rows] = 0.0
        # Nothing attends to nothing, wherever it stands: it must not gather what was written of others.
        self.prefer(HEAD_SIZE - 1, NOTHING_AT, NOTHING_AT, 0.3)

    def compare(
        self, rows: Sequence[int], query: Sequence[int], key: Sequence[int], gains: tuple[float, float]
    ) -> None:
        """Add the product of the query's coordinates and the key's to the attention."""
        at = self._first + torch.tensor(rows)
        self._attention.q_proj.weight[at, torch.tensor(query)] = gains[0]
        self._attention.k_proj.weight[at, torch.tensor(key)] = gains[1]

    def prefer(self, row: int, query: int, key: int, gain: float) -> None:
        """Add ``gain`` times one coordinate of the query times one of the key; of the same key several."""
        self._attention.q_proj.weight[self._first + row, query] = 1.0
        self._attention.k_proj.weight[self._first + row, key] = gain * HEAD_SIZE**0.5

    def prefer_flag(self, row: int, query: int, key: int, gain: float) -> None:
        """Add ``gain`` where a flag of the query meets one of the key."""
        self.prefer(row, query, key, gain / CONSTANT_READ**2)

    def prefer_nothing(self, row: int, query: int, gain: float) -> None:
        """Add ``gain`` to the attention of a query with a flag to nothing."""
        self.prefer(row, query, NOTHING_AT, gain / CONSTANT_READ / NOTHING_READ)

    def attend_if(self, threshold: float, *asked: tuple[int, float]) -> None:
        """Attend to nothing unless flags of the query reach their counts; then to what exceeds a threshold.

        Args:
            threshold: Of the attention to anything else.
            asked: Coordinates of at most two flags, with the counts.
        """
        needed = sum(count for _, count in asked)
        self.prefer_nothing(HALF - 2, CONSTANT_AT, threshold + ASKED * needed)
        for row, (flag, _) in zip((HEAD_SIZE - 2, HALF - 3), asked, strict=False):
            self.prefer_nothing(row, flag, -ASKED)

    def mind_distance(self, waves: tuple[Tensor, Tensor], key: int, gain: float) -> None:
        """Add ``gain`` times a curve of the distance (see :func:`curve`) where the key has a flag."""
        gain = gain / CONSTANT_READ**2
        rows = self._first + torch.arange(NUM_FAST)
        self._attention.q_proj.weight[rows, CONSTANT_AT] = 1.0
        self._attention.k_proj.weight[rows, key] = waves[0] * gain * HEAD_SIZE**0.5
        self._attention.k_proj.weight[rows + HALF, key] = waves[1] * gain * HEAD_SIZE**0.5

    def seek(self, row: int, query: int, key: Sequence[int], code: Tensor, gain: float) -> None:
        """Add ``gain`` where a flag of the query meets a code of the key, and less the less is alike.

        Args:
            row: Of the head.
            query: Coordinate of the flag.
            key: Coordinates of the code.
            code: As it is written there.
            gain: For the whole code; for its opposite as much is taken away.
        """
        length = float(READ * code.square().sum())
        self._attention.q_proj.weight[self._first + row, query] = 1.0
        weights = gain / CONSTANT_READ / length * HEAD_SIZE**0.5 * code
        self._attention.k_proj.weight[self._first + row, torch.tensor(key)] = weights

    def carry(self, source: Sequence[int], target: Sequence[int], factor: float | Tensor) -> None:
        """Add coordinates of what is attended to to other coordinates; at most those of a head in all.

        Args:
            source: Coordinates of what is attended to.
            target: As many coordinates of what attends.
            factor: By which they are multiplied, or a matrix ``[target, source]``.

        Raises:
            ValueError: There are more than a head has.
        """
        rows = self._next_value + torch.arange(len(source))
        if int(rows[-1]) >= self._first + HEAD_SIZE:
            raise ValueError(f"a head carries {HEAD_SIZE} coordinates, asked for more")
        self._next_value += len(source)
        self._attention.v_proj.weight[rows, torch.tensor(source)] = 1 / READ
        if isinstance(factor, Tensor):
            self._attention.o_proj.weight[torch.tensor(target)[:, None], rows] = factor
        else:
            self._attention.o_proj.weight[torch.tensor(target), rows] = factor


def curve(turns: Sequence[float], wanted: Tensor, weight: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Coefficients of the fast pairs' cosines and sines whose sum is near ``wanted``, by distance."""
    angles = torch.arange(len(wanted), dtype=torch.double)[:, None] * torch.tensor(turns[:NUM_FAST])
    waves = torch.cat([angles.cos(), angles.sin()], dim=1)
    weighted = waves.T * weight.double()
    normal = weighted @ waves + ridge * weight.double().sum() * torch.eye(2 * NUM_FAST, dtype=torch.double)
    solved = torch.linalg.solve(normal, weighted @ wanted.double()).float()
    return solved[:NUM_FAST], solved[NUM_FAST:]


def nearest(turns: Sequence[float]) -> tuple[Tensor, Tensor]:
    """A curve that prefers the nearer of places some thirty tokens apart, as points are, or their words."""
    distances = torch.arange(FARTHEST)
    wanted = ((1 + FARTHEST / 30) / (1 + distances / 30)).log() / 3
    return curve(turns, wanted, 1 / (1 + distances / 60), 1e-5)


def falling(turns: Sequence[float]) -> tuple[Tensor, Tensor]:
    """A curve that prefers the nearest."""
    distances = torch.arange(FARTHEST)
    nearest = ((1 + 150 / 8) / (1 + distances / 8)).log().clamp(min=0.2) / 3
    return curve(turns, nearest, 1 / (1 + distances / 5), 1e-5)


def coordinates(part: slice, count: int | None = None, start: int = 0) -> list[int]:
    """The coordinates of a part of the stream: ``count`` of them from ``start`` on, by default all."""
    return list(range(part.start, part.stop))[start:][:count]


__all__ = [
    "ASKED",
    "FARTHEST",
    "HALF",
    "NUM_FAST",
    "STILL",
    "Head",
    "coordinates",
    "curve",
    "falling",
    "nearest",
]
