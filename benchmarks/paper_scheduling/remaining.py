"""Preemption by the expected remaining length, which is updated as a row grows.

A trial that did not pay, kept for the ablation of :mod:`benchmarks.scheduling`: the engine preempts rows only
for lack of memory. Knows lengths and predictions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper_scheduling.replay import Replay, Stay
from local_backend.scheduling.lengths import MAX_QUANTILE, Prediction

_CHECKED_FORWARDS, _MARGIN_TOKENS = 16, 16  # compare this often, and preempt for at least this many tokens
_OFFSET_TOKENS = 10.0  # keeps very short predictions from being certain


def expected_remaining(prediction: Prediction, max_tokens: int) -> NDArray[np.float64]:
    """Expected further tokens of an answer that has 0, 1, ... ``max_tokens - 1`` tokens and goes on.

    Lengths follow a log-logistic distribution with the prediction as median and 90th percentile: the more an
    answer has outgrown its prediction, the longer it is expected to go on.
    """
    median = prediction.num_tokens + _OFFSET_TOKENS
    ratio = max(1.05, (prediction.max_num_tokens + _OFFSET_TOKENS) / median)
    shape = math.log(MAX_QUANTILE / (1 - MAX_QUANTILE)) / math.log(ratio)
    lengths = np.arange(max_tokens) + _OFFSET_TOKENS
    log_odds = shape * np.log(lengths / median)
    longer = np.exp(-np.logaddexp(0, log_odds))  # share of answers with more tokens
    return np.asarray(longer[::-1].cumsum()[::-1] / np.maximum(longer, np.finfo(float).tiny))


@dataclass(slots=True, eq=False)
class _Row:
    """A row that has not ended: its expected remainder by its tokens, its tokens, and its slot if it runs."""

    number: int
    remaining: NDArray[np.float64]
    num_tokens: int = 0
    place: int | None = None
    start: int = 0
    num_before: int = 0

    def urgency(self) -> float:
        return float(self.remaining[self.num_tokens]) + (_MARGIN_TOKENS if self.place is not None else 0)

    def leave(self, end: Literal["ended", "preempted"]) -> Stay:
        assert self.place is not None
        num_new = self.num_tokens - self.num_before
        stay = Stay(self.number, self.place, self.start, num_new, self.num_before, end=end)
        self.place, self.num_before = None, self.num_tokens
        return stay


def replay_longest_remaining(
    num_tokens: Sequence[int],
    predictions: Sequence[Prediction],
    *,
    num_slots: int = 16,
    group_rows: int = 256,
    max_tokens: int = 512,
) -> Replay:
    """Run the rows with the longest expected remainder; preempted rows resume from their KV cache.

    Args:
        num_tokens: The length of each answer, between 1 and ``max_tokens``.
        predictions: One for each answer.
        num_slots: Rows of a forward.
        group_rows: Rows that are queued together; the next group starts when all of them have finished.
        max_tokens: An answer is no longer than this.
    """
    stays: list[Stay] = []
    forward = num_failures = 0
    for first in range(0, len(num_tokens), group_rows):
        group = range(first, min(first + group_rows, len(num_tokens)))
        left = [_Row(number, expected_remaining(predictions[number], max_tokens)) for number in group]
        running: list[_Row] = []
        while left:
            is_checked = forward % _CHECKED_FORWARDS == 0
            if is_checked or len(running) < min(num_slots, len(left)):
                candidates = left if is_checked else [row for row in left if row.place is None]
                num_wanted = num_slots if is_checked else num_slots - len(running)
                chosen = heapq.nlargest(num_wanted, candidates, key=_Row.urgency)
                if is_checked:
                    preempted = [row for row in running if row not in chosen]
                    stays += [row.leave("preempted") for row in preempted]
                    num_failures += len(preempted)
                    running = [row for row in running if row.place is not None]
                places = iter({*range(num_slots)} - {row.place for row in running})
                for row in chosen:
                    if row.place is None:
                        row.place, row.start = next(places), forward
                        running.append(row)
            forward += 1
            for row in running:
                row.num_tokens += 1
                if row.num_tokens == num_tokens[row.number]:
                    stays.append(row.leave("ended"))
            running = [row for row in running if row.place is not None]
            left = [row for row in left if row.num_tokens < num_tokens[row.number]]
    return Replay(tuple(sorted(stays, key=lambda stay: (stay.start, stay.place))), forward, num_failures)
