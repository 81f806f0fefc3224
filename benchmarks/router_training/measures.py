"""Measures of a router, from labels and its decisions or probabilities. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Confusion:
    """Counts of decisions. "Positive" is Skeleton-of-Thought.

    Attributes:
        true_positive: Correctly chosen.
        false_positive: Wrongly chosen.
        false_negative: Missed.
        true_negative: Correctly answered plainly.
    """

    true_positive: int
    false_positive: int
    false_negative: int
    true_negative: int

    @classmethod
    def of(cls, labels: Sequence[bool], decisions: Sequence[bool]) -> Confusion:
        """Counts ``decisions`` against ``labels``.

        Raises:
            ValueError: The lengths differ.
        """
        pairs = list(zip(labels, decisions, strict=True))
        return cls(
            sum(label and decision for label, decision in pairs),
            sum(decision and not label for label, decision in pairs),
            sum(label and not decision for label, decision in pairs),
            sum(not label and not decision for label, decision in pairs),
        )

    @property
    def num_questions(self) -> int:
        """Number of decisions."""
        return self.true_positive + self.false_positive + self.false_negative + self.true_negative

    @property
    def accuracy(self) -> float:
        """The share of correct decisions; 0 if there are none."""
        right = self.true_positive + self.true_negative
        return right / self.num_questions if self.num_questions else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall of Skeleton-of-Thought; 0 if it is never right."""
        both = 2 * self.true_positive + self.false_positive + self.false_negative
        return 2 * self.true_positive / both if both else 0.0

    def table(self) -> str:
        """The matrix as text."""
        return (
            "                 routed to SoT   routed plain\n"
            f"label SoT        {self.true_positive:13}   {self.false_negative:12}\n"
            f"label plain      {self.false_positive:13}   {self.true_negative:12}"
        )


@dataclass(frozen=True)
class Bin:
    """Questions with similar predicted probabilities.

    Attributes:
        predicted: The mean of the probabilities.
        observed: The share that is labelled for Skeleton-of-Thought.
        num_questions: Number of questions.
    """

    predicted: float
    observed: float
    num_questions: int


def calibration(labels: Sequence[bool], probabilities: Sequence[float], *, num_bins: int = 10) -> list[Bin]:
    """Predicted against observed shares in ``num_bins`` bins of equal width; empty ones are left out."""
    members: list[list[tuple[bool, float]]] = [[] for _ in range(num_bins)]
    for label, probability in zip(labels, probabilities, strict=True):
        members[min(int(probability * num_bins), num_bins - 1)].append((label, probability))
    return [
        Bin(
            sum(probability for _, probability in group) / len(group),
            sum(label for label, _ in group) / len(group),
            len(group),
        )
        for group in members
        if group
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Mean gap between prediction and observation over the questions ("ECE"); 0 if there are none."""
    total = sum(one.num_questions for one in bins)
    return (
        sum(one.num_questions * abs(one.predicted - one.observed) for one in bins) / total if total else 0.0
    )


def cheapest_threshold(
    labels: Sequence[bool], probabilities: Sequence[float], *, cost_of_wrong_sot: float
) -> float:
    """The threshold with the lowest cost, if a missed Skeleton-of-Thought costs 1.

    Of equally cheap ones it is the middle of the widest gap, where a new question changes least.
    """
    ordered = sorted(zip(probabilities, labels, strict=True))
    cost = cost_of_wrong_sot * sum(not label for label in labels)  # if all take Skeleton-of-Thought
    best = (cost, 0.0, 0.0)
    for position, (probability, label) in enumerate(ordered):
        cost += 1.0 if label else -cost_of_wrong_sot
        following = ordered[position + 1][0] if position + 1 < len(ordered) else math.nextafter(1.0, 2.0)
        if following > probability:
            middle = (probability + following) / 2
            # Lower cost first, then the wider gap. Between neighbouring floats there is no middle.
            best = min(best, (cost, probability - following, middle if middle > probability else following))
    return best[2]
