"""Numbers out of comparisons: net win rates with their uncertainty, and the judge's own leaning. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sot_chains.evaluation.judge import FAILURES, Comparison

_NUM_RESAMPLES = 2000
_LOW, _HIGH = 2.5, 97.5


@dataclass(frozen=True)
class NetWinRate:
    """How much more often ours is preferred than the other, from -1 to 1, over questions with two verdicts.

    Attributes:
        net: The mean score; 0 of nothing.
        low: Where 95 % of bootstrap resamples of the questions lie above ...
        high: ... and below; all 0 of nothing.
        num_wins: Questions with a score above 0.
        num_ties: Of 0, among them those where the two orders disagree.
        num_losses: Below 0.
    """

    net: float
    low: float
    high: float
    num_wins: int
    num_ties: int
    num_losses: int

    @classmethod
    def of(cls, scores: Sequence[float]) -> NetWinRate:
        """The net win rate of ``scores``, and what it might as well have been."""
        if not scores:
            return cls(0.0, 0.0, 0.0, 0, 0, 0)
        values = np.asarray(scores)
        # Seeded: the same judgements give the same report.
        drawn = np.random.default_rng(0).integers(len(values), size=(_NUM_RESAMPLES, len(values)))
        low, high = np.percentile(values[drawn].mean(axis=1), [_LOW, _HIGH])
        return cls(
            float(values.mean()),
            float(low),
            float(high),
            int((values > 0).sum()),
            int((values == 0).sum()),
            int((values < 0).sum()),
        )


@dataclass(frozen=True)
class JudgeHealth:
    """How far a judge can be trusted.

    Attributes:
        position_bias: How much more often the first answer is preferred than the second, from -1 to 1, over
            judgements with a verdict.
        agreement: The share of questions with two verdicts in which both orders say the same.
        num_judgements: Judgements asked for.
        num_verdicts: Of them, those that gave one.
        num_failures: The others, by kind.
    """

    position_bias: float
    agreement: float
    num_judgements: int
    num_verdicts: int
    num_failures: dict[str, int]

    @classmethod
    def of(cls, comparisons: Sequence[Comparison]) -> JudgeHealth:
        """Over all ``comparisons``."""
        outcomes = Counter(outcome for comparison in comparisons for outcome in comparison.outcomes)
        num_verdicts = outcomes["first"] + outcomes["second"] + outcomes["tie"]
        valid = [comparison for comparison in comparisons if comparison.is_valid]
        mirrored = {"first": "second", "second": "first", "tie": "tie"}
        num_agreeing = sum(mirrored[one.ours_first] == one.ours_second for one in valid)
        return cls(
            (outcomes["first"] - outcomes["second"]) / num_verdicts if num_verdicts else 0.0,
            num_agreeing / len(valid) if valid else 0.0,
            2 * len(comparisons),
            num_verdicts,
            {kind: outcomes[kind] for kind in FAILURES},
        )


def rounded(values: Any, digits: int = 4) -> Any:
    """``values`` with every float rounded, however deep; dataclasses become dicts."""
    if hasattr(values, "__dataclass_fields__"):
        values = asdict(values)
    if isinstance(values, float):
        return round(values, digits)
    if isinstance(values, dict):
        return {key: rounded(value, digits) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [rounded(value, digits) for value in values]
    return values


def median(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return statistics.median(values) if values else 0.0


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return statistics.fmean(values) if values else 0.0
