"""What a policy would cost on answers of known length: the real scheduler, without a model.

Every row's stay in the batch is recorded, to derive cost, padding and a plot from it. Admission goes through
:class:`~local_backend.scheduling.admission.AdmissionQueue` and batches through
:class:`~benchmarks.paper_scheduling.static.MicroBatches`, as in production. Knows lengths and predictions.
Does not know where they come from. Prefill is left out: it is the same for every policy.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper_scheduling.static import MicroBatches, StaticOptions
from local_backend.models.forward_cost import ForwardCost
from local_backend.scheduling.admission import AdmissionQueue
from local_backend.scheduling.lengths import AdmissionPolicy, Prediction

_CONTEXT_STEP = 32  # contexts are rounded to this, so that few costs need to be computed


@dataclass(frozen=True, slots=True)
class Stay:
    """One row's uninterrupted time in the batch.

    Attributes:
        row: Number of the row.
        place: Its slot in the batch.
        start: The first forward it takes part in.
        num_tokens: Tokens it decodes, one per forward.
        num_before: Tokens it had decoded and kept before.
        num_padding: Forwards it waits at the end for the longest row of its batch.
        end: Whether the row ended, or was preempted to resume or restart later.
        is_refill: Whether it took the slot of a finished row while others were running.
    """

    row: int
    place: int
    start: int
    num_tokens: int
    num_before: int = 0
    num_padding: int = 0
    end: Literal["ended", "preempted"] = "ended"
    is_refill: bool = False


@dataclass(frozen=True, slots=True)
class Replay:
    """All stays under one policy.

    Attributes:
        stays: In order of their start.
        num_forwards: Total number of forwards.
        num_failures: Number of preemptions.
    """

    stays: tuple[Stay, ...]
    num_forwards: int
    num_failures: int = 0

    def cost(self, costs: ForwardCost, *, padded: bool = False) -> float:
        """Cost of all forwards, in seconds or whatever unit ``costs`` has.

        Args:
            costs: Cost of a forward by its rows and its context.
            padded: Whether rows that have ended stay in the forward until their batch is done, as in
                ``transformers.generate``; otherwise they leave it, as in the engine.
        """
        rows, contexts = self._rows_and_contexts(padded)
        shapes, counts = np.unique(
            np.stack([rows, -(-contexts // _CONTEXT_STEP) * _CONTEXT_STEP]), axis=1, return_counts=True
        )
        return float(
            sum(
                count * costs(context=int(context), rows=int(number), width=1)
                for (number, context), count in zip(shapes.T, counts, strict=True)
                if number
            )
        )

    def padding_share(self) -> float:
        """The share of slots, over all forwards, that decode no token."""
        num_places = 1 + max((stay.place for stay in self.stays), default=0)
        num_written = sum(stay.num_tokens for stay in self.stays)
        return 1 - num_written / (num_places * self.num_forwards) if self.num_forwards else 0.0

    def _rows_and_contexts(self, padded: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each forward, its number of rows and the tokens that its longest row had decoded before."""
        changes = np.zeros(self.num_forwards + 1, dtype=np.int64)
        contexts = np.zeros(self.num_forwards, dtype=np.int64)
        for stay in self.stays:
            end = stay.start + stay.num_tokens
            changes[stay.start] += 1
            changes[end + (stay.num_padding if padded else 0)] -= 1
            written = np.arange(stay.num_before, stay.num_before + stay.num_tokens)
            np.maximum(contexts[stay.start : end], written, out=contexts[stay.start : end])
        return changes.cumsum()[:-1], contexts


def replay_static(
    num_tokens: Sequence[int], predictions: Sequence[Prediction | None], options: StaticOptions
) -> Replay:
    """Run every group's micro-batches, one after another.

    Args:
        num_tokens: The length of each answer, between 1 and ``options.max_tokens``.
        predictions: One for each answer.
        options: Which parts of the method are used.

    Raises:
        ValueError: The lists differ in length, or a length is out of range.
    """
    _check(num_tokens, predictions, options.max_tokens)
    stays: list[Stay] = []
    forward = num_failures = 0
    for first in range(0, len(num_tokens), options.group_rows):
        group = num_tokens[first : first + options.group_rows]
        batches = MicroBatches(predictions[first : first + options.group_rows], options)
        while (batch := batches.next()) is not None:
            written = [
                min(group[row], limit) - start
                for row, limit, start in zip(batch.rows, batch.limits, batch.starts, strict=True)
            ]
            longest = max(written)
            for place, (row, start, new) in enumerate(zip(batch.rows, batch.starts, written, strict=True)):
                is_aside = start + new < group[row]
                if is_aside:
                    batches.preempt(row)
                end: Literal["ended", "preempted"] = "preempted" if is_aside else "ended"
                stays.append(Stay(first + row, place, forward, new, start, longest - new, end))
            forward += longest
        num_failures += batches.num_failures
    return Replay(tuple(stays), forward, num_failures)


def replay_slots(
    num_tokens: Sequence[int],
    predictions: Sequence[Prediction | None],
    policy: AdmissionPolicy,
    *,
    num_slots: int = 16,
    group_rows: int = 256,
    max_tokens: int = 512,
    is_streamed: bool = False,
    is_delayed: bool = False,
) -> Replay:
    """Refill slots as rows finish; the policy decides which row is admitted next.

    Args:
        num_tokens: The length of each answer, between 1 and ``max_tokens``.
        predictions: One for each answer.
        policy: Order of admission.
        num_slots: Rows of a forward.
        group_rows: Rows that are queued or running at a time.
        max_tokens: An answer is no longer than this.
        is_streamed: Whether a row is queued whenever one finishes, as for a file, or the next group only when
            a whole group has finished, as for batches one after another.
        is_delayed: Whether slots stay free until several are, to prefill together, as in the engine.

    Raises:
        ValueError: The lists differ in length, a length is out of range, or a size is below 1.
    """
    if num_slots < 1 or group_rows < 1:
        raise ValueError(f"num_slots and group_rows must be at least 1, got {num_slots} and {group_rows}")
    _check(num_tokens, predictions, max_tokens)
    stays: list[Stay] = []
    waiting: AdmissionQueue[int] = AdmissionQueue(policy)
    running: list[tuple[int, int]] = []  # a heap of last forwards and slots
    free = list(range(num_slots))
    forward = num_queued = 0
    while num_queued < len(num_tokens) or waiting or running:
        num_present = len(waiting) + len(running)
        if is_streamed or not num_present:
            num_wanted = min(num_queued + group_rows - num_present, len(num_tokens))
            waiting.add((row, predictions[row]) for row in range(num_queued, num_wanted))
            num_queued = num_wanted
        counts = {"num_running": len(running), "num_free": len(free)}
        if free and waiting and (not is_delayed or waiting.is_time(**counts)):
            is_refill = bool(running)
            while free and waiting:
                row, place = waiting.pop()[0], heapq.heappop(free)
                stays.append(Stay(row, place, forward, num_tokens[row], is_refill=is_refill))
                heapq.heappush(running, (forward + num_tokens[row], place))
        forward = forward + 1 if free and waiting else running[0][0]
        while running and running[0][0] <= forward:
            heapq.heappush(free, heapq.heappop(running)[1])
    return Replay(tuple(stays), forward)


def made_up_lengths(
    num_prompts: int,
    *,
    num_samples: int = 4,
    median_tokens: float = 100,
    max_tokens: int = 512,
    seed: int = 0,
) -> list[list[int]]:
    """Random lengths of several answers per prompt, for tests and plots.

    Prompts differ by a factor of about 2.5 either way and answers to one prompt by about 1.3, as with a chat
    model (log-normal).

    Args:
        num_prompts: Number of prompts.
        num_samples: Answers per prompt.
        median_tokens: Half of the prompts are answered in fewer tokens.
        max_tokens: Length at which answers are cut.
        seed: Seed of the draw.
    """
    rng = random.Random(seed)
    centres = [rng.gauss(math.log(median_tokens), 0.9) for _ in range(num_prompts)]
    return [
        [min(max_tokens, max(1, round(math.exp(rng.gauss(centre, 0.25))))) for _ in range(num_samples)]
        for centre in centres
    ]


def _check(num_tokens: Sequence[int], predictions: Sequence[Prediction | None], max_tokens: int) -> None:
    if len(num_tokens) != len(predictions):
        raise ValueError(f"{len(num_tokens)} lengths and {len(predictions)} predictions: give one for each")
    wrong = [length for length in num_tokens if not 1 <= length <= max_tokens]
    if wrong:
        raise ValueError(f"lengths must lie between 1 and {max_tokens} tokens, got {wrong[0]}")
