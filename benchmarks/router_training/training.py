"""Training of the router's head on labelled questions, in numpy.

The loss is cross-entropy plus the Tversky loss with which the paper trains its router (arXiv 2307.15337,
section 4.2; Tversky loss: arXiv 1706.05721): it weighs a wrong Skeleton-of-Thought, which spoils an answer,
more than a missed one, which only costs time. Probabilities are calibrated and the threshold is chosen on
questions that were held out, fold by fold. The encoder is not trained. Knows labelled questions and heads,
not files or commands.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from benchmarks.router_training.labels import LabelledQuestion
from benchmarks.router_training.measures import cheapest_threshold
from sot_chains.router.encoder import WIDTH
from sot_chains.router.trained import NUM_BUCKETS, NUM_FEATURES, Features, Head

Doubles = NDArray[np.float64]

_MEMORY, _MAX_STEPS, _TOLERANCE = 10, 300, 1e-5
_MAX_TRIALS, _ENOUGH_DESCENT, _FLATTER = 40, 1e-4, 0.9


@dataclass(frozen=True)
class TrainingSettings:
    """How a head is trained.

    Attributes:
        tversky_weight: Weight of the Tversky loss; the cross-entropy has weight 1.
        wrong_sot: Weight of wrong Skeleton-of-Thoughts in the Tversky loss.
        missed_sot: Weight of missed ones in the Tversky loss.
        decay: Weight decay, divided by the number of questions.
        cost_of_wrong_sot: Cost of a wrong SoT when choosing the threshold; a missed one costs 1.
        num_folds: Number of folds; each is held out in turn.
    """

    tversky_weight: float = 1.0
    wrong_sot: float = 0.7
    missed_sot: float = 0.3
    decay: float = 1 / 3
    cost_of_wrong_sot: float = 2.0
    num_folds: int = 5

    def __post_init__(self) -> None:
        if self.num_folds < 2:
            raise ValueError(f"num_folds must be at least 2, got {self.num_folds}")
        for name in ("tversky_weight", "wrong_sot", "missed_sot", "decay", "cost_of_wrong_sot"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True)
class Trained:
    """The result of training.

    Attributes:
        head: Trained on all questions.
        held_out: For each question, the probability given by a head that has not seen it.
    """

    head: Head
    held_out: list[float]


def train(
    questions: Sequence[LabelledQuestion],
    features: Sequence[Features],
    settings: TrainingSettings | None = None,
    *,
    features_by_fold: Sequence[Sequence[Features]] | None = None,
) -> Trained:
    """Trains a head.

    Args:
        questions: Questions with labels of both kinds.
        features: Features of each question.
        settings: How to train; the defaults unless given.
        features_by_fold: For each fold, the features of all questions by an encoder that has not seen the
            fold; needed if the encoder was trained on the questions.

    Raises:
        ValueError: There are too few questions of a kind to hold some out.
    """
    settings = settings or TrainingSettings()
    labels = np.array([question.use_sot for question in questions], dtype=np.float64)
    fewest = int(min(labels.sum(), (1 - labels).sum()))
    if fewest < 2 * settings.num_folds:
        raise ValueError(
            f"{fewest} questions of one label are too few to hold out {settings.num_folds} folds: "
            f"give at least {2 * settings.num_folds} of each"
        )
    matrix = _Matrix(features)
    folds = np.array([find_fold(question.question, settings.num_folds) for question in questions])
    scores = np.zeros(len(questions))
    for fold in range(settings.num_folds):
        of_fold = matrix if features_by_fold is None else _Matrix(features_by_fold[fold])
        weights = _fit(of_fold.rows(folds != fold), labels[folds != fold], settings)
        scores[folds == fold] = of_fold.rows(folds == fold).scores(weights)
    slope, offset = _calibrate(scores, labels)
    held_out = _sigmoid(slope * scores + offset)
    threshold = cheapest_threshold(
        [question.use_sot for question in questions],
        held_out.tolist(),
        cost_of_wrong_sot=settings.cost_of_wrong_sot,
    )
    weights = _fit(matrix, labels, settings)
    weights *= slope  # calibrates the scores
    weights[-1] += offset
    return Trained(Head(weights.astype(np.float32), threshold), held_out.tolist())


class _Matrix:
    """Features of many questions; the words in compressed sparse rows."""

    def __init__(self, features: Sequence[Features]) -> None:
        self._features = list(features)
        lengths = [len(one.indices) - WIDTH for one in self._features]
        self._row_of = np.repeat(np.arange(len(lengths)), lengths)
        self._indices = np.concatenate([one.indices[:-WIDTH] for one in self._features])
        self._values = np.concatenate([one.values[:-WIDTH] for one in self._features]).astype(np.float64)
        self._dense = np.stack([one.values[-WIDTH:] for one in self._features]).astype(np.float64)

    def rows(self, chosen: NDArray[np.bool_]) -> _Matrix:
        """The matrix of the chosen questions."""
        return _Matrix([one for one, is_chosen in zip(self._features, chosen, strict=True) if is_chosen])

    def scores(self, weights: Doubles) -> Doubles:
        """Scores of the questions; ``weights`` holds one for each feature and, last, the bias."""
        words = np.bincount(
            self._row_of, weights=self._values * weights[self._indices], minlength=len(self._features)
        )
        total: Doubles = words + self._dense @ weights[NUM_BUCKETS:-1] + weights[-1]
        return total

    def gradient(self, of_scores: Doubles) -> Doubles:
        """The gradient of the weights, from that of the scores."""
        words = np.bincount(
            self._indices, weights=self._values * of_scores[self._row_of], minlength=NUM_BUCKETS
        )
        return np.concatenate([words, of_scores @ self._dense, [of_scores.sum()]])


def _fit(matrix: _Matrix, labels: Doubles, settings: TrainingSettings) -> Doubles:
    num_questions = len(labels)

    def loss(weights: Doubles) -> tuple[float, Doubles]:
        scores = matrix.scores(weights)
        probabilities = _sigmoid(scores)
        entropy = float((np.logaddexp(0, scores) - labels * scores).mean())
        tversky, of_probabilities = tversky_loss(
            probabilities, labels, settings.wrong_sot, settings.missed_sot
        )
        of_scores = (probabilities - labels) / num_questions
        of_scores += settings.tversky_weight * of_probabilities * probabilities * (1 - probabilities)
        decay = settings.decay / num_questions
        penalised = weights.copy()
        penalised[-1] = 0  # the bias is not penalised
        value = entropy + settings.tversky_weight * tversky + decay / 2 * float(penalised @ penalised)
        return value, matrix.gradient(of_scores) + decay * penalised

    return minimise(loss, np.zeros(NUM_FEATURES + 1))


def tversky_loss(
    probabilities: Doubles, labels: Doubles, wrong_sot: float, missed_sot: float
) -> tuple[float, Doubles]:
    """One minus the Tversky index of soft counts, and its gradient.

    Args:
        probabilities: ``[questions]``.
        labels: 0 or 1, ``[questions]``.
        wrong_sot: Weight of false positives; above ``missed_sot`` they cost more.
        missed_sot: Weight of false negatives.
    """
    hits = float(probabilities @ labels)
    total = (
        hits
        + wrong_sot * float(probabilities @ (1 - labels))
        + missed_sot * float((1 - probabilities) @ labels)
    )
    if total == 0:
        return 0.0, np.zeros_like(probabilities)
    of_total = labels + wrong_sot * (1 - labels) - missed_sot * labels
    return 1 - hits / total, -(labels * total - hits * of_total) / total**2


def minimise(loss: Callable[[Doubles], tuple[float, Doubles]], start: Doubles) -> Doubles:
    """The minimiser of ``loss``, by L-BFGS (Nocedal and Wright, Numerical Optimization, algorithm 7.5).

    Args:
        loss: Returns value and gradient.
        start: Starting point.
    """
    point = start
    value, gradient = loss(point)
    steps: list[tuple[Doubles, Doubles]] = []  # of the point and of the gradient
    for _ in range(_MAX_STEPS):
        if np.abs(gradient).max() < _TOLERANCE:
            break
        direction = -_inverse_hessian_times(gradient, steps)
        slope = float(gradient @ direction)
        size, shortest, longest = 1.0, 0.0, np.inf
        for _ in range(_MAX_TRIALS):  # bisection until both of Wolfe's conditions hold
            new_point = point + size * direction
            new_value, new_gradient = loss(new_point)
            if new_value > value + _ENOUGH_DESCENT * size * slope:
                longest = size
            elif float(new_gradient @ direction) < _FLATTER * slope:
                shortest = size
            else:
                break
            size = 2 * shortest if longest == np.inf else (shortest + longest) / 2
        else:
            break  # no descent left within the precision of floats
        step, change = new_point - point, new_gradient - gradient
        steps = [*steps[-_MEMORY + 1 :], (step, change)]
        point, value, gradient = new_point, new_value, new_gradient
    return point


def _inverse_hessian_times(gradient: Doubles, steps: Sequence[tuple[Doubles, Doubles]]) -> Doubles:
    result = gradient.copy()
    parts: list[float] = []
    for step, change in reversed(steps):
        part = float(step @ result) / float(step @ change)
        parts.append(part)
        result -= part * change
    if steps:
        step, change = steps[-1]
        result *= float(step @ change) / float(change @ change)
    for (step, change), part in zip(steps, reversed(parts), strict=True):
        result += (part - float(change @ result) / float(step @ change)) * step
    return result


def _calibrate(scores: Doubles, labels: Doubles) -> tuple[float, float]:
    """Slope and offset that turn held-out scores into probabilities (Platt, 1999)."""
    # Platt's targets keep the slope finite if the scores separate the labels perfectly.
    num_positive, num_negative = labels.sum(), (1 - labels).sum()
    targets = np.where(labels == 1, (num_positive + 1) / (num_positive + 2), 1 / (num_negative + 2))

    def loss(line: Doubles) -> tuple[float, Doubles]:
        logits = line[0] * scores + line[1]
        error = (_sigmoid(logits) - targets) / len(scores)
        return float((np.logaddexp(0, logits) - targets * logits).mean()), np.array(
            [error @ scores, error.sum()]
        )

    slope, offset = minimise(loss, np.array([1.0, 0.0]))
    return float(slope), float(offset)


def find_fold(question: str, num_folds: int) -> int:
    """The fold of a question; it depends on the text alone, so it does not change with other questions."""
    return zlib.crc32(b"fold:" + question.encode()) % num_folds


def _sigmoid(values: Doubles) -> Doubles:
    result: Doubles = 1 / (1 + np.exp(-np.clip(values, -500, 500)))
    return result


def save_head(head: Head, path: Path) -> None:
    """Writes the ``.safetensors`` file that ``Head.load`` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    threshold = np.array([head.threshold], dtype=np.float32)
    save_file({"weights": head.weights.astype(np.float16), "threshold": threshold}, path)
