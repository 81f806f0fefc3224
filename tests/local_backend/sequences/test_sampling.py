"""Tokens drawn at many positions at once have, each, the distribution of their position."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from local_backend import SamplingParams
from local_backend.sequences import sampling
from local_backend.sequences.sampling import probabilities, sample

FILTERS: list[dict[str, float]] = [
    {},
    {"top_p": 0.7},
    {"top_p": 0.02},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 0.9},
    {"top_k": 3},
    {"top_k": 60, "top_p": 0.8, "min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.1},
]


def _scores(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [30, 500])
@pytest.mark.parametrize("number", range(len(FILTERS)), ids=map(str, FILTERS))
def test_the_distribution_is_that_of_transformers(number: int, size: int) -> None:
    options = FILTERS[number]
    params = SamplingParams(temperature=0.8, **options)  # type: ignore[arg-type]  # some of its fields
    warpers = [
        TemperatureLogitsWarper(0.8),
        *([TopKLogitsWarper(int(options["top_k"]))] if "top_k" in options else []),
        *([TopPLogitsWarper(options["top_p"])] if "top_p" in options else []),
        *([MinPLogitsWarper(options["min_p"])] if "min_p" in options else []),
    ]
    scores = _scores(size, number)
    warped = scores[None]
    for warper in warpers:
        warped = warper(torch.zeros(1, 1, dtype=torch.long), warped)
    torch.testing.assert_close(probabilities(scores, params), warped.softmax(-1)[0])


@pytest.mark.parametrize("is_coarse", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("number", range(len(FILTERS)), ids=map(str, FILTERS))
def test_what_is_drawn_has_the_distribution(number: int, is_coarse: bool) -> None:
    """Chi-square over 4,000 draws in batches with another row; right code fails one seed in 10,000."""
    scores = _scores(70, number)
    if is_coarse:
        scores = scores.round()
    params = SamplingParams(temperature=0.8, **FILTERS[number])  # type: ignore[arg-type]  # some of its fields
    other = SamplingParams(temperature=1.2, top_p=0.5)
    uniforms = torch.rand(4_000, generator=torch.Generator().manual_seed(9), dtype=torch.float64).tolist()
    drawn: Counter[int] = Counter()
    for start in range(0, 4_000, 500):
        some = uniforms[start : start + 500]
        stacked = torch.stack([_scores(70, 99), *[scores] * len(some)])
        drawn.update(sample(stacked, [other, *[params] * len(some)], [0.5, *some]).tolist()[1:])
    expected = 4_000 * probabilities(scores, params)
    assert all(expected[token] > 0 for token in drawn)
    classes: dict[int, list[float]] = {}
    for token, value in enumerate(expected.tolist()):
        counted, likely = classes.setdefault(token if value >= 10 else -1, [0.0, 0.0])
        classes[token if value >= 10 else -1] = [counted + drawn[token], likely + value]
    statistic = sum((counted - likely) ** 2 / likely for counted, likely in classes.values() if likely)
    freedom = len(classes) - 1
    limit = max(freedom, 1) * (1 - 2 / (9 * max(freedom, 1)) + 3.72 * (2 / (9 * max(freedom, 1))) ** 0.5) ** 3
    assert statistic <= limit


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_a_draw_does_not_depend_on_the_batch(options: dict[str, float]) -> None:
    mixed = [
        SamplingParams(temperature=0.3 + number, **filters)  # type: ignore[arg-type]  # some of its fields
        for number, filters in enumerate(FILTERS)
    ]
    params = SamplingParams(temperature=0.8, **options)  # type: ignore[arg-type]  # some of its fields
    for seed in range(20):
        scores, uniform = (1 + seed % 2 * 99) * _scores(700, seed), (seed + 0.5) / 20
        (alone,) = sample(scores[None].clone(), [params], [uniform]).tolist()
        others = torch.stack([*(_scores(700, 50 + one) for one in range(len(mixed))), scores])
        together = sample(others, [*mixed, params], [*[0.4] * len(mixed), uniform]).tolist()
        assert together[-1] == alone


def test_without_sorting_the_same_tokens_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU sorts: what it may draw is what the CPU may draw, at the ends of the range of numbers, too."""
    params = SamplingParams(temperature=1.0, top_k=700, top_p=0.6, min_p=0.05)
    scores = _scores(3_000)
    possible = set(probabilities(scores, params).nonzero()[:, 0].tolist())
    ends = [0.0, 1 - 2**-53, *torch.linspace(0, 1 - 2**-24, 600).tolist()]
    rows = scores.repeat(len(ends), 1)
    assert set(sample(rows.clone(), [params] * len(ends), ends).tolist()) <= possible
    monkeypatch.setattr(sampling, "_READ_AT_ONCE", ())
    assert set(sample(rows, [params] * len(ends), ends).tolist()) <= possible


def test_where_nothing_can_be_drawn_only_that_position_says_so() -> None:
    scores = torch.zeros(3, 40)
    scores[0], scores[2, 5] = -torch.inf, torch.nan
    for options in [*FILTERS, {"top_k": 39}]:
        params = SamplingParams(temperature=0.7, **options)  # type: ignore[arg-type]  # some of its fields
        drawn = sample(scores.clone(), [params] * 3, [0.2, 0.5, 0.9]).tolist()
        assert drawn[0] == drawn[2] == -1
        assert 0 <= drawn[1] < 40


def test_what_is_ruled_out_is_not_drawn_when_fewer_than_top_k_are_left() -> None:
    """Of few tokens, of as many as there are blocks, of more, and of all."""
    scores = torch.full((2_000,), -torch.inf)
    scores[[3, 700, 1_999]] = torch.tensor([1.0, 0.5, -300.0])
    for top_k in (5, 60, 1_900, 2_000, 9_000):
        params = SamplingParams(temperature=400.0, top_k=top_k)
        ends = [0.0, 0.5, 1 - 2**-53]
        assert sample(scores.repeat(3, 1), [params] * 3, ends).tolist() == [3, 700, 1_999]


def test_near_a_temperature_of_zero_the_likeliest_token_is_drawn() -> None:
    scores = 50 * _scores(400)
    for temperature in (1e-300, 1e-9, 1e-4):
        params = SamplingParams(temperature=temperature)
        assert sample(scores[None].clone(), [params], [0.999]).tolist() == [int(scores.argmax())]
