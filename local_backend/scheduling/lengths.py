"""Answer lengths: predictions, and predictors that learn from finished answers.

Knows numbers of tokens. Does not know models, the engine or what a prediction is used for.
Predicting lengths to batch answers of similar length: Zheng et al., arXiv 2305.13144.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np

from local_backend.drafting.drafter import require_at_least
from local_backend.sequences.sampling import SamplingParams

AdmissionPolicy = Literal["first_come", "shortest_first", "longest_first"]
"""``first_come``: order of arrival. ``shortest_first``: lowest mean latency. ``longest_first``: shortest
total time, because no long answer is left to decode alone at the end."""
DEFAULT_MAX_OVERTAKES = 1024
MAX_QUANTILE = 0.9
"""The quantile that :attr:`Prediction.max_num_tokens` estimates."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted length of one answer.

    Attributes:
        num_tokens: Expected tokens of the answer; orders rows.
        max_num_tokens: 90th percentile of the tokens of sampled answers to this prompt; determines how much
            memory is reserved. Never below ``num_tokens``.

    Raises:
        ValueError: A number is negative or not finite, or the maximum is below the expected length.
    """

    num_tokens: float
    max_num_tokens: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_num_tokens) and 0 <= self.num_tokens <= self.max_num_tokens):
            raise ValueError(
                "a prediction needs 0 <= num_tokens <= max_num_tokens, both finite, "
                f"got {self.num_tokens} and {self.max_num_tokens}"
            )

    def within(self, room: float) -> Prediction:
        """The prediction for an answer of at most ``room`` tokens."""
        return Prediction(min(self.num_tokens, room), min(self.max_num_tokens, room))


class LengthPredictor(Protocol):
    """Predicts the lengths of answers to prompts."""

    def predict(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None
    ) -> list[Prediction | None]:
        """One prediction for each prompt, in order; ``None`` where there is no data to predict from.

        ``params`` say how each answer will be sampled; the caller caps predictions at ``max_tokens``.
        """


@runtime_checkable
class LearningPredictor(LengthPredictor, Protocol):
    """A predictor that learns from observed answers."""

    def observe(self, prompt: Sequence[int], num_tokens: int) -> None:
        """Learn the length of a complete answer to ``prompt``; called from any thread."""


# Prompts are compared by prefixes of these lengths; those with the same prefix share a template.
_BEGINNINGS = (8, 16, 32, 64, 128, 256)
_KEPT_LENGTHS = 256  # most recent answers kept for each template


@dataclass(slots=True)
class _Seen:
    """The most recent answers to prompts that share a prefix."""

    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_LENGTHS))
    prediction: Prediction | None = None  # cached; None when out of date


class ObservedLengths:
    """Predicts from observed answers, where a template has at least ``min_answers``; thread-safe.

    Of more than ``max_templates`` templates the least recently observed are evicted.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(self, *, min_answers: int = 8, max_templates: int = 8192) -> None:
        require_at_least(1, min_answers=min_answers, max_templates=max_templates)
        self._min_answers = min_answers
        self._max_templates = max_templates
        self._all = _Seen()
        self._seen: OrderedDict[tuple[int, ...], _Seen] = OrderedDict()
        self._lock = threading.Lock()

    def observe(self, prompt: Sequence[int], num_tokens: int) -> None:
        """Learn the length of a complete answer to ``prompt``."""
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
        """One prediction for each prompt; ``None`` until ``min_answers`` answers were observed."""
        with self._lock:
            return [self._predict(prompt) for prompt in prompts]

    def _predict(self, prompt: Sequence[int]) -> Prediction | None:
        known = [self._all]
        for beginning in _beginnings(prompt):
            if beginning not in self._seen:
                break  # longer prefixes are missing too, or about to be evicted
            known.append(self._seen[beginning])
        deepest = next((seen for seen in reversed(known) if len(seen.lengths) >= self._min_answers), None)
        if deepest is None:
            return None
        if deepest.prediction is None:
            quantiles = np.quantile(deepest.lengths, (0.5, MAX_QUANTILE), method="inverted_cdf")
            deepest.prediction = Prediction(*map(float, quantiles))
        return deepest.prediction

    @staticmethod
    def _count(seen: _Seen, num_tokens: int) -> None:
        seen.lengths.append(num_tokens)
        seen.prediction = None


def _beginnings(prompt: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Prefixes of a prompt, from short to long."""
    prompt = tuple(prompt[: _BEGINNINGS[-1]])
    for length in _BEGINNINGS:
        if length > len(prompt):
            return
        yield prompt[:length]


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Order of admission and memory limit.

    Attributes:
        policy: ``"first_come"``; ``"shortest_first"``, for the lowest mean latency; ``"longest_first"``, for
            the shortest total time.
        predictor: Predicts answer lengths, which order rows and reserve memory. A learning predictor is told
            of every complete answer, and predicts waiting rows again as it learns. ``None`` is
            :class:`~local_backend.scheduling.lengths.ObservedLengths`.
        max_cache_bytes: Memory for the KV cache, prefix cache included; rows that do not fit wait. Allocated
            in full when first needed. With ``None`` it grows to what ``max_rows`` rows need, and on a GPU is
            limited by ``gpu_memory_share``.
        gpu_memory_share: Of the GPU's memory that is free when the engine is made.
        max_overtakes: How many later rows may be admitted before a waiting row.

    Raises:
        ValueError: The policy is unknown or a number is out of range.
    """

    policy: AdmissionPolicy = "first_come"
    predictor: LengthPredictor | None = None
    max_cache_bytes: int | None = None
    gpu_memory_share: float = 0.85
    max_overtakes: int = DEFAULT_MAX_OVERTAKES

    def __post_init__(self) -> None:
        if self.policy not in get_args(AdmissionPolicy):
            raise ValueError(f"no policy is named {self.policy!r}; there are {get_args(AdmissionPolicy)}")
        require_at_least(0, max_overtakes=self.max_overtakes)
        require_at_least(1, max_cache_bytes=self.max_cache_bytes)
        if not 0 < self.gpu_memory_share <= 1:
            raise ValueError(f"gpu_memory_share must be above 0 and at most 1, got {self.gpu_memory_share}")

    @classmethod
    def of(cls, scheduling: Scheduling | AdmissionPolicy | None) -> Scheduling:
        """Convert a policy's name or ``None`` to a ``Scheduling``; raises ``TypeError`` for anything else."""
        if scheduling is None or isinstance(scheduling, str):
            return cls(scheduling or "first_come")
        if isinstance(scheduling, Scheduling):
            return scheduling
        raise TypeError(f"scheduling is a Scheduling or a policy's name, got {type(scheduling).__name__}")
