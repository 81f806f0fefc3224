"""What a prediction says, and how far off predictions were: worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_backend.scheduling.lengths import (
    LengthErrors,
    Prediction,
    admission_tokens,
    quantile_of,
)


def test_the_errors_of_three_answers_by_hand() -> None:
    predictions = [Prediction(100, 150), Prediction(100, 150), Prediction(100, 150)]
    errors = LengthErrors.of(predictions, [100, 160, 210])
    assert errors.num_answers == 3
    assert errors.mean_absolute_error == pytest.approx((0 + 60 + 110) / 3)
    assert errors.acc_50 == pytest.approx(1 / 3)
    assert errors.acc_100 == pytest.approx(2 / 3)
    # 50 too high at 0.1 a token, then 10 and 60 too low at 0.9.
    assert errors.pinball_loss == pytest.approx((5 + 9 + 54) / 3)
    assert errors.share_within_max == pytest.approx(1 / 3)


def test_a_distance_of_exactly_fifty_counts_as_within() -> None:
    assert LengthErrors.of([Prediction(10, 10)], [60]).acc_50 == 1
    beyond = LengthErrors.of([Prediction(10, 10)], [61])
    assert beyond.acc_50 == 0
    assert beyond.mean_absolute_error == 51


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=40),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.integers(1, 500),
)
def test_no_constant_loses_less_than_the_quantile(lengths: list[int], quantile: float, other: int) -> None:
    best = quantile_of(lengths, quantile)
    assert best in lengths
    assert sum(length <= best for length in lengths) >= quantile * len(lengths) - 1e-9

    def loss(constant: float) -> float:
        missing = [length - constant for length in lengths]
        return sum(max(quantile * one, (quantile - 1) * one) for one in missing)

    assert loss(best) <= loss(other) + 1e-9


def test_the_quantile_of_ten_values_is_one_of_them() -> None:
    assert quantile_of(range(1, 11), 0.9) == 9
    assert quantile_of([7], 0.1) == 7


@pytest.mark.parametrize("wrong", [(-1, 5), (5, 4), (1, math.inf), (math.nan, 4)])
def test_a_prediction_that_says_nothing_sensible_is_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="num_tokens <= max_num_tokens"):
        Prediction(*wrong)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="1 predictions and 2 lengths"):
        LengthErrors.of([Prediction(1, 1)], [1, 2])
    with pytest.raises(ValueError, match="0 predictions and 0 lengths"):
        LengthErrors.of([], [])
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile_of([1], 1.0)
    with pytest.raises(ValueError, match="at least one value"):
        quantile_of([], 0.5)


def test_who_may_be_long_begins_early_even_if_less_is_expected() -> None:
    sure, unsure = Prediction(100, 110), Prediction(90, 200)
    tokens = [admission_tokens(one, "longest_first") for one in (sure, unsure)]
    assert tokens == [120, 310]
    assert admission_tokens(unsure, "shortest_first") == 90
    assert admission_tokens(None, "longest_first") is None
