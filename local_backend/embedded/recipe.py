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
            "questions": 0.3,
            "many questions": 0.12,
            "documents": 0.18,
            "edit": 0.27,
            "condense": 0.1,
            "repeat": 0.03,
        },
    ),
    guessed_size=0.5,
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
    Lesson((_POINTS, kept), guessed_size=0.5, departing_weight=16.0)
    for kept in (_OF_DOCUMENTS, _LAST_OF_TUNED.streams[0])
)
_EDITING_OF_PLAIN = tuple(
    Lesson((_POINTS, kept), departing_weight=16.0) for kept in (_OF_DOCUMENTS, _LAST_OF_PLAIN.streams[0])
)
# Then the same once more with follow-ups. Taught beside the consistency stage, where rates are higher, they
# cost one whole answer in ten.
_FOLLOWING_UP, _FOLLOWING_UP_OF_PLAIN = (
    tuple(replace(lesson, follow_ups_size=0.5) for lesson in lessons)
    for lessons in (_EDITING, _EDITING_OF_PLAIN)
)


@dataclass(frozen=True)
class Refining:
    """A stage behind all others, at a low rate, which warms up and falls by itself.

    It begins from weights as they would ship, and at its end a share of these is kept.

    Attributes:
        name: Of the stage.
        first_step: The number of its first step: so many go before.
        num_steps: How many it has.
        learning_rate_share: Of the learning rates, at its peak.
        kept_share: How much of the weights it began with is kept beside what it made of them.
        lessons: In turn.
    """

    name: str
    first_step: int
    num_steps: int
    learning_rate_share: float
    kept_share: float
    lessons: Sequence[Lesson]


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
        num_editing_steps: Steps of the stage behind all of them that teaches changed answers.
        num_following_up_steps: Steps of the stage behind that one, which teaches follow-ups as well.
        tokens_per_batch: Padded tokens of each of a step's two batches.
        learning_rates: At their peak: after warm-up, until they fall linearly in the last ``decay_share`` of
            the steps of the last stage.
        then_learning_rate_share: Of the learning rates, after the first steps: longer at their peaks, the
            stream grows without bound, because the ballast keeps the norms from shrinking it.
        last_learning_rate_share: The same of the last steps.
        editing_learning_rate_share, following_up_learning_rate_share: The same of these two stages.
        refining_decay_share: In the last of such a share of their steps it falls linearly.
        editing_kept_share: How much of the weights that the stage began with is kept: without, an answer in a
            hundred ended behind its first points.
        following_up_kept_share: The same of the other: of less, two answers in a hundred repeated themselves.
        refining_warmup_steps: How many of their steps warm up.
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
    num_following_up_steps: int = 200
    tokens_per_batch: int = 2_000
    learning_rates: LearningRates = field(default_factory=LearningRates)
    then_learning_rate_share: float = 0.4
    last_learning_rate_share: float = 0.05
    editing_learning_rate_share: float = 0.12
    following_up_learning_rate_share: float = 0.16
    refining_decay_share: float = 0.9
    editing_kept_share: float = 0.2
    following_up_kept_share: float = 0.6
    refining_warmup_steps: int = 20
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
    def num_steps_before_refining(self) -> int:
        """Of all stages but those that refine."""
        return self.num_steps + self.num_consistency_steps + self.num_last_steps

    @property
    def refining(self) -> tuple[Refining, ...]:
        """The stages that refine, in order."""
        is_tuned = self.num_consistency_steps > 0
        first = self.num_steps_before_refining
        editing = Refining(
            "editing",
            first,
            self.num_editing_steps,
            self.editing_learning_rate_share,
            self.editing_kept_share,
            _EDITING if is_tuned else _EDITING_OF_PLAIN,
        )
        following_up = Refining(
            "following up",
            first + self.num_editing_steps,
            self.num_following_up_steps,
            self.following_up_learning_rate_share,
            self.following_up_kept_share,
            _FOLLOWING_UP if is_tuned else _FOLLOWING_UP_OF_PLAIN,
        )
        return editing, following_up

    @property
    def num_steps_in_all(self) -> int:
        """Of all stages."""
        return self.num_steps_before_refining + self.num_editing_steps + self.num_following_up_steps

    def refining_at(self, step: int) -> Refining | None:
        """The stage that refines at a step, if one does."""
        begun = [stage for stage in self.refining if stage.num_steps and stage.first_step <= step]
        return begun[-1] if begun else None


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
    of warm-up. The stages that refine warm up and fall by themselves.
    """
    if (stage := options.refining_at(step)) is not None:
        num_left = stage.first_step + stage.num_steps - step
        fall = num_left / (options.refining_decay_share * stage.num_steps)
        warm = (step - stage.first_step + 1) / options.refining_warmup_steps
        return stage.learning_rate_share * min(1.0, warm, max(0.02, fall))
    num_left = options.num_steps_before_refining - step
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
    if (stage := options.refining_at(step)) is not None:
        return stage.lessons[step % len(stage.lessons)]
    return _LAST_OF_TUNED if options.num_consistency_steps else _LAST_OF_PLAIN


__all__ = ["PLAIN_OPTIONS", "BuildOptions", "Lesson", "Refining", "lesson_at", "rate_at"]
