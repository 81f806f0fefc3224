"""Errors of predicted lengths, worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.length_errors import LengthErrors
from local_backend.scheduling.lengths import Prediction


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


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="1 predictions and 2 lengths"):
        LengthErrors.of([Prediction(1, 1)], [1, 2])
    with pytest.raises(ValueError, match="0 predictions and 0 lengths"):
        LengthErrors.of([], [])
