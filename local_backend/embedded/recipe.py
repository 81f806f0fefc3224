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
        guessed_size: Of a batch of answers with guess tokens, as a share of ``tokens_per_batch``; with them
            it is four or five times as wide. 0 for none.
        follow_ups_size: Of a batch of follow-ups, as a share of ``tokens_per_batch``; 0 for none. They have
            batches of their own because they are learned late: of some two hundred batches hardly anything.
        departing_weight: How much tokens weigh at which a copy departs from what it copies, or ends.
    """

    streams: Sequence[Mapping[str, float]]
    guessed_size: float = 0.0
    follow_ups_size: float = 0.0
    departing_weight: float = 4.0


FOLLOW_UPS_WEIGHT = 0.6  # how much a batch of follow-ups counts beside the others of its step
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
# With guess tokens nothing of the rest is left out. They hang from whole answers, which therefore need not be
# drawn without them as well.
_CONSISTENCY = Lesson(
    (
        {"plain": 0.08, "expansion": 0.16, "skeleton": 0.3, "several": 0.22, "beginning": 0.24},
        {
            "questions": 0.33,
            "many questions": 0.13,
            "documents": 0.2,
            "edit": 0.3,
            "repeat": 0.04,
        },
    ),
    guessed_size=0.5,
    follow_ups_size=0.5,
)
_LAST_OF_TUNED = replace(
    _CONSISTENCY,
    streams=({"plain": 0.25, "expansion": 0.15, "skeleton": 0.35, "several": 0.25}, _CONSISTENCY.streams[1]),
)
# At last, at a low rate, what an answer of points is changed to, above all where it ends; beside it all that
# was learned, documents in turns with topics.
_POINTS: Mapping[str, float] = {"points": 1.0}
_OF_DOCUMENTS: Mapping[str, float] = {"questions": 0.5, "many questions": 0.2, "documents": 0.3}
_EDITING = tuple(
    Lesson((_POINTS, kept), guessed_size=0.5, follow_ups_size=0.5, departing_weight=16.0)
    for kept in (_OF_DOCUMENTS, _LAST_OF_TUNED.streams[0])
)
_EDITING_OF_PLAIN = tuple(
    Lesson((_POINTS, kept), departing_weight=16.0) for kept in (_OF_DOCUMENTS, _LAST_OF_PLAIN.streams[0])
)


@dataclass(frozen=True)
class BuildOptions:
    """What a build depends on.

    Attributes:
        num_steps: Optimizer steps of the plain stage.
        num_tuning_steps: How many of them, at the beginning, tune the circuits alone, on questions about
            documents, while nothing else changes.
        num_first_steps: How many after these learn to tell topics apart.
        num_consistency_steps: Steps of the consistency stage; 0 leaves it out.
        num_last_steps: Steps behind the last of these stages, which fix what it learned.
        num_editing_steps: Steps of the editing stage, behind all of them.
        tokens_per_batch: Padded tokens of each of a step's two batches.
        learning_rates: At their peak: after warm-up, until they fall linearly in the last ``decay_share`` of
            the steps of the last stage.
        then_learning_rate_share: Of the learning rates, after the first steps: longer at their peaks, the
            stream grows without bound, because the ballast keeps the norms from shrinking it.
        last_learning_rate_share: The same of the last steps.
        editing_learning_rate_share: The same of the editing stage, in which it falls linearly in the last
            ``editing_decay_share`` of the steps.
        editing_kept_share: How much of the weights that the editing stage began with is kept beside what it
            made of them: without, an answer in a hundred ended behind its first points.
        seed: Of the initial weights and of every step's examples.
        hidden_size, intermediate_size, num_layers, num_heads, head_size, vocabulary_size, rope_theta: Shape
            of the model, which with its tokenizer fits into 16 MB.
    """

    num_steps: int = 560
    num_tuning_steps: int = 40
    num_first_steps: int = 240
    num_consistency_steps: int = 960
    num_last_steps: int = 100
    num_editing_steps: int = 260
    tokens_per_batch: int = 2_000
    learning_rates: LearningRates = field(default_factory=LearningRates)
    then_learning_rate_share: float = 0.4
    last_learning_rate_share: float = 0.05
    editing_learning_rate_share: float = 0.12
    editing_decay_share: float = 0.9
    editing_kept_share: float = 0.2
    editing_warmup_steps: int = 20
    warmup_steps: int = 30
    decay_share: float = 0.58
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
    def first_editing_step(self) -> int:
        """The number of the editing stage's first step: so many go before."""
        return self.num_steps + self.num_consistency_steps + self.num_last_steps

    @property
    def num_steps_in_all(self) -> int:
        """Of all stages."""
        return self.first_editing_step + self.num_editing_steps


PLAIN_OPTIONS = replace(
    BuildOptions(),
    num_steps=1600,
    num_consistency_steps=0,
    num_last_steps=150,
    decay_share=0.54,
)


def rate_at(step: int, options: BuildOptions) -> float:
    """Share of the learning rate at a step: warm-up, the first steps, a lower plateau, a fall to a fiftieth.

    The consistency stage goes on at the plateau, so that what the plain stage left is still soft, and the
    fall is its. The last steps fall once more, from a little above. While the circuits are tuned it is that
    of warm-up. The editing stage warms up and falls by itself.
    """
    num_edited = step - options.first_editing_step
    if num_edited >= 0:
        fall = (options.num_editing_steps - num_edited) / (
            options.editing_decay_share * options.num_editing_steps
        )
        warm = (num_edited + 1) / options.editing_warmup_steps
        return options.editing_learning_rate_share * min(1.0, warm, max(0.02, fall))
    num_left = options.first_editing_step - step
    if num_left <= options.num_last_steps:
        return options.last_learning_rate_share * max(0.02, num_left / options.num_last_steps)
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
    if step >= options.first_editing_step:
        return (_EDITING if options.num_consistency_steps else _EDITING_OF_PLAIN)[step % 2]
    return _LAST_OF_TUNED if options.num_consistency_steps else _LAST_OF_PLAIN


__all__ = ["FOLLOW_UPS_WEIGHT", "PLAIN_OPTIONS", "BuildOptions", "Lesson", "lesson_at", "rate_at"]
