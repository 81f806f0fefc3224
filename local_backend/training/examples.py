"""What a training step reads: examples by number, each with its noise, the same for the same number.

Training that was interrupted goes on with the very examples it would have seen. Knows trajectories as
columns of token ids. Does not know models.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

from torch.utils.data import Dataset

from local_backend.training.noise import NoiseOptions, drawn_copies, stored_copies
from local_backend.training.packing import Copy, Example, num_packed_tokens

_BUCKET_BATCHES = 24


@dataclass(frozen=True, slots=True)
class Trajectory:
    """How one answer came about.

    Attributes:
        prompt_ids: What was continued.
        answer_ids: The fixed point, its end token included where it has one.
        starts: For each iterate its first place in the answer.
        iterates: The guesses of each forward, in the order of decoding.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    starts: tuple[int, ...] = ()
    iterates: tuple[tuple[int, ...], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_ids) + len(self.answer_ids)


class Joined(Sequence[Trajectory]):
    """Several sequences of trajectories as one, none of them copied.

    Args:
        parts: The sequences, in order.
    """

    def __init__(self, *parts: Sequence[Trajectory]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))
        self.lengths = [length for part in parts for length in lengths_of(part)]

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, place: int) -> Trajectory: ...
    @overload
    def __getitem__(self, place: slice) -> list[Trajectory]: ...
    def __getitem__(self, place: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        part = bisect_right(self._ends, place)
        return self._parts[part][place - (self._ends[part - 1] if part else 0)]


def lengths_of(trajectories: Sequence[Trajectory]) -> list[int]:
    """Tokens of each trajectory, without reading those that lie on disk."""
    known: list[int] | None = getattr(trajectories, "lengths", None)
    return known or [trajectory.num_tokens for trajectory in trajectories]


class NoisyExamples(Dataset[Example]):
    """As many examples as training takes, drawn from trajectories.

    Every pass over the trajectories is in another order; examples of like length stand together, so that a
    batch holds little padding. Item ``k`` is the same whatever was asked for before.

    Args:
        trajectories: What to draw from.
        num_items: How many items there are: steps times rows of a step.
        batch_size: Rows that share a forward.
        noise: What the copies look like; ``None`` for clean text alone.
        with_next: Whether stored iterates come with the next one, as the local loss needs.
        learned_prompts: Share of examples of which the text of the prompt is learned, too.
        seed: Of order and noise.

    Raises:
        ValueError: There is no trajectory.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        num_items: int,
        batch_size: int,
        *,
        noise: NoiseOptions | None,
        with_next: bool = False,
        learned_prompts: float = 0.0,
        seed: int = 0,
    ) -> None:
        if not trajectories:
            raise ValueError("there is nothing to train on: give at least one trajectory")
        self._trajectories = trajectories
        self._batch_size = batch_size
        self._noise = noise
        self._with_next = with_next
        self._learned_prompts = learned_prompts
        self._seed = seed
        self._lengths = lengths_of(trajectories)
        self._order = self._draw_order(num_items)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> Example:
        trajectory = self._trajectories[self._order[number]]
        rng = random.Random(f"{self._seed}:{number}")
        copies = [] if self._noise is None else _copies(trajectory, self._noise, rng, self._with_next)
        learns_prompt = rng.random() < self._learned_prompts
        return Example(
            trajectory.prompt_ids, trajectory.answer_ids, tuple(copies), learns_prompt=learns_prompt
        )

    def mean_tokens(self, num_sampled: int = 64) -> float:
        """Packed tokens of an example, on average over the first ones."""
        sampled = [num_packed_tokens(self[number]) for number in range(min(num_sampled, len(self)))]
        return sum(sampled) / len(sampled)

    def _draw_order(self, num_items: int) -> list[int]:
        rng = random.Random(f"{self._seed}:order")
        order: list[int] = []
        bucket_size = self._batch_size * _BUCKET_BATCHES
        waiting: list[int] = []
        while len(order) < num_items:
            while len(waiting) < bucket_size:
                places = list(range(len(self._trajectories)))
                rng.shuffle(places)
                waiting += places
            bucket = sorted(waiting[:bucket_size], key=self._lengths.__getitem__)
            del waiting[:bucket_size]
            batches = [bucket[at : at + self._batch_size] for at in range(0, bucket_size, self._batch_size)]
            rng.shuffle(batches)
            order += [place for batch in batches for place in batch]
        return order[:num_items]


def _copies(trajectory: Trajectory, noise: NoiseOptions, rng: random.Random, with_next: bool) -> list[Copy]:
    if trajectory.iterates and rng.random() < noise.stored_share:
        return stored_copies(
            trajectory.starts, trajectory.iterates, trajectory.answer_ids, noise, rng, with_next=with_next
        )
    return drawn_copies(trajectory.prompt_ids, trajectory.answer_ids, noise, rng)
