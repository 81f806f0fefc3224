"""Simulation: priority by predicted length on many replicas, by load; against first come.

Requests arrive at random (Poisson) with the lengths of Vicuna-7B's answers to Alpaca prompts. A router sends
each to the less busy of two replicas drawn at random, as Ray Serve does. A replica has slots, as vLLM's
``max_num_seqs``; a slot writes one token a step. Priority is the deadline of
:class:`~benchmarks.length_priority.LengthPriority`: arrival plus ``stretch`` times the
predicted time alone. The prediction is the mean of answers to the same prompt at other temperatures, which is
better than what a predictor sees of the prompt alone. The bound is the shortest first with lengths that are
known: no order in which requests are begun, and then run to their end, has a much lower mean.

``python -m benchmarks.replicas --save`` (a simulation: no model runs)
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import save
from benchmarks.scheduling import predict_from_siblings, read_answers

DATA = Path(__file__).parents[2] / "shared" / "data" / "lengths" / "vicuna7b_alpaca_dev.jsonl"
PREFILL_STEPS = 16  # what reading a prompt takes, in steps


@dataclass(slots=True)
class _Replica:
    num_free: int
    waiting: list[tuple[float, int]] = field(default_factory=list)  # a heap of priorities and requests
    num_present: int = 0


@dataclass(frozen=True, slots=True)
class Simulated:
    """What requests experienced.

    Attributes:
        mean_steps: From arrival to the last token, on average.
        p99_steps: Of 99 of 100 requests at most.
        worst_wait: The longest wait before the first step, as a multiple of the request's time alone.
        share_above_5: Share of requests that waited for more than five times their time alone.
    """

    mean_steps: float
    p99_steps: float
    worst_wait: float
    share_above_5: float


def simulate(
    lengths: Sequence[int],
    predictions: Sequence[float],
    *,
    stretch: float,
    load: float,
    num_replicas: int,
    num_slots: int,
    num_requests: int,
    seed: int = 0,
) -> Simulated:
    """Serve ``num_requests`` requests drawn from ``lengths``; a ``stretch`` of 0 is first come."""
    if not lengths or len(lengths) != len(predictions):
        raise ValueError(f"{len(lengths)} lengths and {len(predictions)} predictions: give one for each")
    rng = random.Random(seed)
    drawn = [rng.randrange(len(lengths)) for _ in range(num_requests)]
    alone = [lengths[each] + PREFILL_STEPS for each in drawn]
    rate = load * num_replicas * num_slots / statistics.mean(alone)
    arrivals: list[float] = []
    now = 0.0
    for _ in drawn:
        now += rng.expovariate(rate)
        arrivals.append(now)
    replicas = [_Replica(num_slots) for _ in range(num_replicas)]
    ends: list[tuple[float, int]] = []  # a heap of times and replicas
    waits = [0.0] * num_requests

    def start(replica: int, request: int, now: float) -> None:
        replicas[replica].num_free -= 1
        waits[request] = now - arrivals[request]
        heapq.heappush(ends, (now + alone[request], replica))

    def end_until(now: float) -> None:
        while ends and ends[0][0] <= now:
            ended, number = heapq.heappop(ends)
            replica = replicas[number]
            replica.num_free += 1
            replica.num_present -= 1
            if replica.waiting:
                start(number, heapq.heappop(replica.waiting)[1], ended)

    for request, arrived in enumerate(arrivals):
        end_until(arrived)
        two = [rng.randrange(num_replicas), rng.randrange(num_replicas)]
        number = min(two, key=lambda each: replicas[each].num_present)
        replicas[number].num_present += 1
        if replicas[number].num_free:
            start(number, request, arrived)
        else:
            deadline = arrived + stretch * (predictions[drawn[request]] + PREFILL_STEPS)
            heapq.heappush(replicas[number].waiting, (deadline, request))
    end_until(float("inf"))
    totals = sorted(wait + each for wait, each in zip(waits, alone, strict=True))
    ratios = [wait / each for wait, each in zip(waits, alone, strict=True)]
    return Simulated(
        statistics.mean(totals),
        totals[len(totals) * 99 // 100],
        max(ratios),
        sum(ratio > 5 for ratio in ratios) / num_requests,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--stretch", type=float, default=16)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--save", action="store_true", help="keep the result")
    options = parser.parse_args()
    lengths, siblings = read_answers(options.data)
    predictions = [each.num_tokens for each in predict_from_siblings(siblings)]
    cases: list[dict[str, Any]] = []
    for num_replicas, num_slots in ((1, 1), (1, 4), (1, 16), (8, 16), (64, 4), (64, 16)):
        for load in (0.5, 0.7, 0.9, 0.97):
            shape: dict[str, Any] = {"num_replicas": num_replicas, "num_slots": num_slots, "load": load}
            first, ours, bound = (
                simulate(lengths, guess, stretch=stretch, num_requests=options.requests, **shape)
                for guess, stretch in ((predictions, 0.0), (predictions, options.stretch), (lengths, 1e9))
            )
            cases.append(
                {
                    **shape,
                    "mean_under_first_come": round(1 - ours.mean_steps / first.mean_steps, 3),
                    "bound_mean_under_first_come": round(1 - bound.mean_steps / first.mean_steps, 3),
                    "p99_over_first_come": round(ours.p99_steps / first.p99_steps, 2),
                    "share_above_5_first_come": round(first.share_above_5, 4),
                    "share_above_5": round(ours.share_above_5, 4),
                    "worst_wait_first_come": round(first.worst_wait, 1),
                    "worst_wait": round(ours.worst_wait, 1),
                }
            )
            print(json.dumps(cases[-1]), flush=True)
    summary = {"stretch": options.stretch, "num_requests": options.requests, "is_simulation": True}
    print(json.dumps(summary))
    if options.save:
        print(save("replicas", summary, cases))


if __name__ == "__main__":
    main()
