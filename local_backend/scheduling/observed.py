"""Lengths as observed: running quantiles by prompt template, without training.

Prompts that are made by one program begin alike: a system message, an instruction, then what varies. So
answers are counted under the first tokens of their prompt, at several lengths of that beginning, and a
prompt is predicted from the longest beginning of which enough is known; what no template tells, all answers
together do. Knows token ids and lengths. Does not know models or templates as such.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from local_backend.sampling import SamplingParams
from local_backend.scheduling.lengths import MAX_QUANTILE, Prediction, quantile_of

# Beginnings are compared at these numbers of tokens; what varies later is the same template.
_BEGINNINGS = (8, 16, 32, 64, 128, 256)
_KEPT_LENGTHS = 256  # of a template: the last so many answers


@dataclass(slots=True)
class _Seen:
    """The last answers to prompts with one beginning."""

    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_LENGTHS))
    prediction: Prediction | None = None  # of these; None when it has to be reckoned anew


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
