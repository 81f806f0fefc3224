"""Predictions and quantiles, worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.length_errors import empirical_quantile
from local_backend.scheduling.lengths import Prediction


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=40),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.integers(1, 500),
)
def test_no_constant_loses_less_than_the_quantile(lengths: list[int], quantile: float, other: int) -> None:
    best = empirical_quantile(lengths, quantile)
    assert best in lengths
    assert sum(length <= best for length in lengths) >= quantile * len(lengths) - 1e-9

    def loss(constant: float) -> float:
        missing = [length - constant for length in lengths]
        return sum(max(quantile * one, (quantile - 1) * one) for one in missing)

    assert loss(best) <= loss(other) + 1e-9


def test_the_quantile_of_ten_values_is_one_of_them() -> None:
    assert empirical_quantile(range(1, 11), 0.9) == 9
    assert empirical_quantile([7], 0.1) == 7


@pytest.mark.parametrize("wrong", [(-1, 5), (5, 4), (1, math.inf), (math.nan, 4)])
def test_a_prediction_that_says_nothing_sensible_is_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="num_tokens <= max_num_tokens"):
        Prediction(*wrong)


def test_a_quantile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        empirical_quantile([1], 1.0)
    with pytest.raises(ValueError, match="at least one value"):
        empirical_quantile([], 0.5)
