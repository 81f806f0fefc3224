"""How far predicted answer lengths are off."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from local_backend.scheduling.lengths import MAX_QUANTILE, Prediction


@dataclass(frozen=True, slots=True)
class LengthErrors:
    """Errors of predictions.

    Attributes:
        num_answers: Answers compared.
        mean_absolute_error: Of the expected length, in tokens.
        acc_50, acc_100: Shares of expected lengths at most 50 and 100 tokens off, as in the paper.
        pinball_loss: Of the maximum, in tokens: each token too low costs its quantile, 0.9, each token too
            high what the quantile lacks to 1.
        share_within_max: Share of answers no longer than the maximum.
    """

    num_answers: int
    mean_absolute_error: float
    acc_50: float
    acc_100: float
    pinball_loss: float
    share_within_max: float

    @classmethod
    def of(cls, predictions: Sequence[Prediction], num_tokens: Sequence[int]) -> LengthErrors:
        """Compare predictions with actual lengths.

        Raises:
            ValueError: The lists are empty or differ in length.
        """
        if not predictions or len(predictions) != len(num_tokens):
            raise ValueError(
                f"{len(predictions)} predictions and {len(num_tokens)} lengths: give at least one, and one "
                "length for each prediction"
            )
        actual = np.array(num_tokens)
        off = np.abs([prediction.num_tokens for prediction in predictions] - actual)
        missing = actual - [prediction.max_num_tokens for prediction in predictions]
        return cls(
            len(predictions),
            float(off.mean()),
            float((off <= 50).mean()),
            float((off <= 100).mean()),
            float(np.maximum(MAX_QUANTILE * missing, (MAX_QUANTILE - 1) * missing).mean()),
            float((missing <= 0).mean()),
        )


def empirical_quantile(values: Collection[float], quantile: float) -> float:
    """The smallest of ``values`` that at least a share ``quantile`` of them do not exceed.

    It is the constant prediction with the lowest pinball loss on them.

    Raises:
        ValueError: ``values`` is empty, or the quantile is not between 0 and 1.
    """
    if not values or not 0 < quantile < 1:
        raise ValueError(
            f"a quantile between 0 and 1 needs at least one value, got {quantile} of {len(values)}"
        )
    return float(np.quantile(list(values), quantile, method="inverted_cdf"))
