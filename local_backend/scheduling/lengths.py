"""How long an answer will be: what a prediction says, who makes one, and how good it was.

Knows numbers of tokens. Does not know models, the engine or what a prediction is used for.
Predicting lengths to batch likes with likes: Zheng et al., arXiv 2305.13144.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from local_backend.requests.sampling import SamplingParams
from local_backend.scheduling.waiting_queue import DEFAULT_MAX_OVERTAKES, AdmissionPolicy, WaitingQueue

MAX_QUANTILE = 0.9
"""The quantile that :attr:`Prediction.max_num_tokens` stands for."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long one answer is expected to be.

    Attributes:
        num_tokens: The answer's tokens, as expected: what orders rows.
        max_num_tokens: Tokens that nine answers of ten to this prompt do not exceed, were many sampled: what
            memory is reserved by. Never below ``num_tokens``.

    Raises:
        ValueError: A number is negative or not finite, or the maximum is below what is expected.
    """

    num_tokens: float
    max_num_tokens: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_num_tokens) and 0 <= self.num_tokens <= self.max_num_tokens):
            raise ValueError(
                "a prediction needs 0 <= num_tokens <= max_num_tokens, both finite, "
                f"got {self.num_tokens} and {self.max_num_tokens}"
            )


class LengthPredictor(Protocol):
    """Says of prompts how long their answers will be."""

    def predict(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None
    ) -> list[Prediction | None]:
        """One prediction for each prompt, in order; ``None`` where it has nothing to go by.

        Args:
            prompts: Token ids of each prompt.
            params: How each answer will be sampled, where that is known. Whoever asks cuts predictions to
                ``max_tokens`` itself.
        """
        ...


@runtime_checkable
class LearningPredictor(LengthPredictor, Protocol):
    """A predictor that learns from the answers it is told of."""

    def observe(self, prompt: Sequence[int], num_tokens: int) -> None:
        """An answer to ``prompt`` has ended by itself after ``num_tokens`` tokens; from any thread."""
        ...


class AnswerLengthLog(Protocol):
    """Writes down how long answers were; e.g. :class:`~local_backend.length_models.length_log.LengthLog`."""

    def add(self, prompt: Sequence[int], num_tokens: int, params: SamplingParams) -> None:
        """An answer to ``prompt`` has ended by itself after ``num_tokens`` tokens; from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class LengthErrors:
    """How far predictions were off.

    Attributes:
        num_answers: Answers compared.
        mean_absolute_error: Of the expected length, in tokens.
        acc_50, acc_100: Shares of expected lengths at most 50 and 100 tokens off, as in the paper.
        pinball_loss: Of the maximum, at :data:`MAX_QUANTILE`, in tokens.
        share_within_max: Answers that were no longer than the maximum.
    """

    num_answers: int
    mean_absolute_error: float
    acc_50: float
    acc_100: float
    pinball_loss: float
    share_within_max: float

    @classmethod
    def of(cls, predictions: Sequence[Prediction], num_tokens: Sequence[int]) -> LengthErrors:
        """Compare predictions with the lengths that came.

        Raises:
            ValueError: There are none, or not as many of one as of the other.
        """
        expected = [prediction.num_tokens for prediction in predictions]
        maxima = [prediction.max_num_tokens for prediction in predictions]
        return cls(
            len(predictions),
            mean_absolute_error(expected, num_tokens),
            share_within(expected, num_tokens, 50),
            share_within(expected, num_tokens, 100),
            pinball_loss(maxima, num_tokens, MAX_QUANTILE),
            sum(actual <= most for actual, most in _pairs(num_tokens, maxima)) / len(predictions),
        )


def mean_absolute_error(predicted: Sequence[float], actual: Sequence[float]) -> float:
    """The mean distance of predicted and actual lengths, in tokens.

    Raises:
        ValueError: There are none, or not as many of one as of the other.
    """
    return sum(abs(one - other) for one, other in _pairs(predicted, actual)) / len(actual)


def share_within(predicted: Sequence[float], actual: Sequence[float], num_tokens: float) -> float:
    """The share of predictions at most ``num_tokens`` off: Acc-50 and Acc-100 of arXiv 2305.13144.

    Raises:
        ValueError: There are none, or not as many of one as of the other.
    """
    return sum(abs(one - other) <= num_tokens for one, other in _pairs(predicted, actual)) / len(actual)


def pinball_loss(predicted: Sequence[float], actual: Sequence[float], quantile: float) -> float:
    """The mean loss that is least at the quantile: a token too low costs ``quantile``, one too high the rest.

    Raises:
        ValueError: There are none, not as many of one as of the other, or the quantile is not within 0 and 1.
    """
    if not 0 < quantile < 1:
        raise ValueError(f"quantile must lie between 0 and 1, got {quantile}")
    losses = (
        max(quantile * (came - said), (quantile - 1) * (came - said))
        for said, came in _pairs(predicted, actual)
    )
    return sum(losses) / len(actual)


def quantile_of(values: Sequence[float], quantile: float) -> float:
    """The least of ``values`` that at least the share ``quantile`` of them do not exceed.

    The constant with the least :func:`pinball_loss` on them.

    Raises:
        ValueError: There is none, or the quantile is not within 0 and 1.
    """
    if not values or not 0 < quantile < 1:
        raise ValueError(
            f"a quantile between 0 and 1 needs at least one value, got {quantile} of {len(values)}"
        )
    ordered = sorted(values)
    # Rounded, or 0.9 of 10 values would be the tenth: 0.9 * 10 is a little more than 9 in binary for some.
    return ordered[min(len(ordered), max(1, math.ceil(round(quantile * len(ordered), 9)))) - 1]


def _pairs(one: Sequence[float], other: Sequence[float]) -> list[tuple[float, float]]:
    if not one or len(one) != len(other):
        raise ValueError(
            f"{len(one)} and {len(other)} numbers: give at least one, and one actual for each predicted"
        )
    return list(zip(one, other, strict=True))


def admission_tokens(prediction: Prediction | None, policy: AdmissionPolicy) -> float | None:
    """The length by which a policy orders a row; ``None`` where none is predicted.

    ``longest_first`` goes by twice the maximum less what is expected: as far above the maximum as that is
    above what is expected. What costs is a row that begins late and turns out long, so those begin early of
    which that cannot be ruled out, sure or not. The other policies go by what is expected.
    """
    if prediction is None:
        return None
    if policy == "longest_first":
        return 2 * prediction.max_num_tokens - prediction.num_tokens
    return prediction.num_tokens


# Beginnings are compared at these numbers of tokens; what varies later is the same template.
_BEGINNINGS = (8, 16, 32, 64, 128, 256)
_KEPT_LENGTHS = 256  # of a template: the last so many answers


@dataclass(slots=True)
class _Seen:
    """The last answers to prompts with one beginning."""

    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_LENGTHS))
    prediction: Prediction | None = None  # of these; None when it has to be computed again


class ObservedLengths:
    """Predicts from the answers it was told of; for any thread.

    Args:
        min_answers: Answers of a template, at least, before it is gone by.
        max_templates: Beginnings that are remembered; those not met for longest are forgotten.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(self, *, min_answers: int = 8, max_templates: int = 8192) -> None:
        if min_answers < 1 or max_templates < 1:
            raise ValueError(
                f"min_answers and max_templates must be at least 1, got {min_answers} and {max_templates}"
            )
        self._min_answers = min_answers
        self._max_templates = max_templates
        self._all = _Seen()
        self._seen: OrderedDict[tuple[int, ...], _Seen] = OrderedDict()
        self._lock = threading.Lock()

    def observe(self, prompt: Sequence[int], num_tokens: int) -> None:
        """An answer to ``prompt`` has ended by itself after ``num_tokens`` tokens."""
        with self._lock:
            self._count(self._all, num_tokens)
            for beginning in _beginnings(prompt):
                self._count(self._seen.setdefault(beginning, _Seen()), num_tokens)
                self._seen.move_to_end(beginning)
            while len(self._seen) > self._max_templates:
                self._seen.popitem(last=False)

    def predict(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None
    ) -> list[Prediction | None]:
        """One prediction for each prompt; ``None`` as long as too few answers of any kind are known."""
        with self._lock:
            return [self._predict(prompt) for prompt in prompts]

    def _predict(self, prompt: Sequence[int]) -> Prediction | None:
        known = [self._all]
        for beginning in _beginnings(prompt):
            if beginning not in self._seen:
                break  # longer ones are not there either, or are about to be forgotten
            known.append(self._seen[beginning])
        deepest = next((seen for seen in reversed(known) if len(seen.lengths) >= self._min_answers), None)
        if deepest is None:
            return None
        if deepest.prediction is None:
            deepest.prediction = Prediction(
                quantile_of(deepest.lengths, 0.5), quantile_of(deepest.lengths, MAX_QUANTILE)
            )
        return deepest.prediction

    @staticmethod
    def _count(seen: _Seen, num_tokens: int) -> None:
        seen.lengths.append(num_tokens)
        seen.prediction = None


def _beginnings(prompt: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The first tokens of a prompt, ever more of them."""
    prompt = tuple(prompt[: _BEGINNINGS[-1]])
    for length in _BEGINNINGS:
        if length > len(prompt):
            return
        yield prompt[:length]


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Who begins first, and within how much memory.

    Attributes:
        policy: ``"first_come"``; ``"shortest_first"``, for the least mean latency; ``"longest_first"``, for
            the whole to be done soonest.
        predictor: Says how long answers will be; what it says orders rows and reserves memory. One that
            learns is told of every answer that has ended by itself, and asked again about those who wait.
            ``None`` is :class:`~local_backend.scheduling.lengths.ObservedLengths`.
        max_cache_bytes: Memory for keys and values, those of kept beginnings included; what does not fit
            waits. It is taken whole when it is first needed. ``None`` takes what ``max_rows`` rows need.
        max_overtakes: How many that were submitted later may begin before a row that waits.
        length_log: Where prompts and the lengths of their answers are written down, to train a predictor.

    Raises:
        ValueError: The policy is unknown or a number is out of range.
    """

    policy: AdmissionPolicy = "first_come"
    predictor: LengthPredictor | None = None
    max_cache_bytes: int | None = None
    max_overtakes: int = DEFAULT_MAX_OVERTAKES
    length_log: AnswerLengthLog | None = None

    def __post_init__(self) -> None:
        WaitingQueue[int](self.policy, max_overtakes=self.max_overtakes)  # says what is wrong with them
        if self.max_cache_bytes is not None and self.max_cache_bytes < 1:
            raise ValueError(f"max_cache_bytes must be at least 1, got {self.max_cache_bytes}")

    @classmethod
    def of(cls, scheduling: Scheduling | AdmissionPolicy | None) -> Scheduling:
        """A policy's name, or nothing, as what it stands for.

        Raises:
            TypeError: It is neither.
        """
        if scheduling is None:
            return cls()
        if isinstance(scheduling, str):
            return cls(policy=scheduling)
        if not isinstance(scheduling, Scheduling):
            raise TypeError(
                f"scheduling is a Scheduling or the name of a policy, got {type(scheduling).__name__}"
            )
        return scheduling
