"""The simulation of replicas: first come against priority by predicted length."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.replicas import PREFILL_STEPS, simulate

RANDOM = random.Random(3)
LENGTHS = [RANDOM.choice([5, 20, 100, 400]) for _ in range(500)]
SHAPE: dict[str, Any] = {"num_replicas": 2, "num_slots": 2, "num_requests": 4000}


def test_without_a_queue_nobody_waits() -> None:
    found = simulate(LENGTHS, [float(each) for each in LENGTHS], stretch=16, load=0.01, **SHAPE)
    assert found.share_above_5 == 0
    mean = sum(LENGTHS) / len(LENGTHS) + PREFILL_STEPS
    assert found.mean_steps == pytest.approx(mean, rel=0.1)


def test_known_lengths_lower_the_mean_and_the_share_of_long_waits() -> None:
    lengths = [float(each) for each in LENGTHS]
    first, ours = (simulate(LENGTHS, lengths, stretch=stretch, load=0.95, **SHAPE) for stretch in (0, 16))
    assert ours.mean_steps < 0.9 * first.mean_steps
    assert ours.share_above_5 < first.share_above_5


def test_predictions_that_say_nothing_change_nothing_but_by_chance() -> None:
    shape = {**SHAPE, "load": 0.95}
    assert simulate(LENGTHS, [50.0] * 500, stretch=16, **shape) == simulate(
        LENGTHS, [50.0] * 500, stretch=0, **shape
    )


def test_one_prediction_for_each_length() -> None:
    with pytest.raises(ValueError, match="500 lengths and 1 predictions"):
        simulate(LENGTHS, [1.0], stretch=0, load=0.5, **SHAPE)
