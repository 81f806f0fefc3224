"""What each step of the build learns from, and at which learning rate.

Knows kinds of examples, numbers of steps and rates. Does not know models, batches or losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from local_backend.embedded.optimizers import LearningRates


@dataclass(frozen=True)
class Lesson:
    """What one step learns from: a batch of each stream, which holds examples of one kind.

    Attributes:
        streams: Per stream the kinds (see :mod:`~local_backend.embedded.tasks`) and how often each is drawn.
        size: Of a batch, as a share of ``BuildOptions.tokens_per_batch``.
        weight: How much a batch counts.
        guessed_size: The same of a batch of answers with guess tokens, which is four or five times as wide;
            0 for none.
        guessed_weight: How much it counts.
    """

    streams: Sequence[Mapping[str, float]]
    size: float = 1.0
    weight: float = 1.0
    guessed_size: float = 0.0
    guessed_weight: float = 1.0


# First the circuits are tuned; then the model learns to tell topics apart and to begin answers, from many
# short examples; then what to say, from long ones.
_TUNING = Lesson(({"questions": 0.6, "many questions": 0.4},))
_FIRST = Lesson(
    (
        {"beginning": 0.7, "skeleton": 0.15, "plain": 0.15},
        {"choices": 0.2, "questions": 0.4, "repeat": 0.2, "short documents": 0.2},
    )
)
_THEN = Lesson(
    (
        {"plain": 0.28, "expansion": 0.17, "skeleton": 0.21, "several": 0.12, "beginning": 0.22},
        {
            "questions": 0.27,
            "many questions": 0.1,
            "documents": 0.15,
            "edit": 0.3,
            "condense": 0.12,
            "repeat": 0.06,
        },
    )
)
# A plain model ends with whole answers above all, in which one slip spoils what follows.
_LAST_OF_PLAIN = Lesson(
    ({"plain": 0.75, "expansion": 0.1, "skeleton": 0.05, "several": 0.1}, _THEN.streams[1])
)
# In the consistency stage the guess tokens take most of a step; beside them what has none is kept in mind,
# and at last it is what is learned most.
_CONSISTENCY = Lesson(
    (
        {
            "plain": 0.08,
            "skeleton": 0.12,
            "beginning": 0.18,
            "several": 0.1,
            "questions": 0.18,
            "many questions": 0.07,
            "documents": 0.1,
            "edit": 0.13,
            "condense": 0.04,
        },
    ),
    size=0.65,
    weight=0.8,
    guessed_size=0.65,
)
_LAST_OF_TUNED = Lesson(
    (
        {"plain": 0.34, "skeleton": 0.26, "several": 0.14, "expansion": 0.12, "beginning": 0.14},
        {"questions": 0.28, "many questions": 0.1, "documents": 0.22, "edit": 0.3, "condense": 0.1},
    ),
    size=0.9,
)
_LAST_OF_TUNED_GUESSED = replace(_LAST_OF_TUNED, guessed_size=0.3, guessed_weight=0.8)


@dataclass(frozen=True)
class BuildOptions:
    """What a build depends on.

    Attributes:
        num_steps: Optimizer steps of the plain stage.
        num_tuning_steps: How many of them, at the beginning, tune the circuits alone, on questions about
            documents, while nothing else changes.
        num_first_steps: How many after these learn to tell topics apart.
        num_consistency_steps: Steps of the consistency stage; 0 leaves it out.
        num_last_steps: Steps behind the last stage.
        tokens_per_batch: Padded tokens of each of a step's two batches.
        learning_rates: At their peak: after warm-up, until they fall linearly in the last ``decay_share`` of
            the steps of the last stage.
        then_learning_rate_share: Of the learning rates, after the first steps: longer at their peaks, the
            stream grows without bound, because the ballast keeps the norms from shrinking it.
        last_learning_rate_share: The same of the last steps, when it has fallen already.
        seed: Of the initial weights and of every step's examples.
        hidden_size, intermediate_size, num_layers, num_heads, head_size, vocabulary_size, rope_theta: Shape
            of the model, which with its tokenizer fits into 16 MB.
    """

    num_steps: int = 1000
    num_tuning_steps: int = 40
    num_first_steps: int = 240
    num_consistency_steps: int = 800
    num_last_steps: int = 300
    tokens_per_batch: int = 2_000
    learning_rates: LearningRates = field(default_factory=LearningRates)
    then_learning_rate_share: float = 0.4
    last_learning_rate_share: float = 0.2
    warmup_steps: int = 30
    last_warmup_steps: int = 10
    decay_share: float = 0.54
    weight_decay: float = 0.5
    seed: int = 0
    hidden_size: int = 380
    intermediate_size: int = 256
    num_layers: int = 6
    num_heads: int = 5
    head_size: int = 64
    vocabulary_size: int = 4096
    rope_theta: float = 1e12

    @property
    def num_steps_in_all(self) -> int:
        """Of all stages."""
        return self.num_steps + self.num_consistency_steps + self.num_last_steps


PLAIN_OPTIONS = replace(
    BuildOptions(),
    num_steps=1600,
    num_consistency_steps=0,
    num_last_steps=150,
    last_learning_rate_share=0.05,
    last_warmup_steps=1,
)


def rate_at(step: int, options: BuildOptions) -> float:
    """Share of the learning rate at a step: warm-up, the first steps, a lower plateau, a fall to a fiftieth.

    The consistency stage goes on at the plateau, so that what the plain stage left is still soft, and the
    fall is its. The last steps rise and fall once more, lower. While the circuits are tuned it is that of
    warm-up.
    """
    num_left = options.num_steps_in_all - step
    if num_left <= options.num_last_steps:
        place = options.num_last_steps - num_left
        warm = min(1.0, (place + 1) / options.last_warmup_steps)
        return options.last_learning_rate_share * warm * max(0.02, num_left / options.num_last_steps)
    place = max(0, step - options.num_tuning_steps)
    peak = 1.0 if place < options.num_first_steps else options.then_learning_rate_share
    falling = options.num_consistency_steps or options.num_steps - options.num_tuning_steps
    warm = min(1.0, (place + 1) / options.warmup_steps)
    fall = min(1.0, (num_left - options.num_last_steps) / max(1.0, options.decay_share * falling))
    return peak * min(warm, max(0.02, fall))


def lesson_at(step: int, options: BuildOptions) -> Lesson:
    """What a step learns from."""
    if step < options.num_tuning_steps:
        return _TUNING
    if step < options.num_tuning_steps + options.num_first_steps:
        return _FIRST
    if step < options.num_steps:
        return _THEN
    if step < options.num_steps + options.num_consistency_steps:
        return _CONSISTENCY
    if not options.num_consistency_steps:
        return _LAST_OF_PLAIN
    return _LAST_OF_TUNED if step % 2 else _LAST_OF_TUNED_GUESSED


__all__ = ["PLAIN_OPTIONS", "BuildOptions", "Lesson", "lesson_at", "rate_at"]
