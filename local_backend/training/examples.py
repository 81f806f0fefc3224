"""Training examples by index, with noise that is the same for the same index.

Interrupted training resumes with exactly the examples it would have seen. Knows trajectories as columns of
token ids. Does not know models.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

from torch.utils.data import Dataset

from local_backend.sequences.outputs import Trajectory
from local_backend.training.packing import Copy, Example, num_packed_tokens

_MOST_SHIFT = 4
_NUM_CANDIDATES = 3


@dataclass(frozen=True, slots=True)
class NoiseOptions:
    """How the noisy copies of an example are made.

    Attributes:
        block_size: Tokens of a copy.
        num_passes: How often copies cover the answer, each time split at other positions.
        window: Blocks over which the noise rises from ``lowest`` to ``highest``, then starts over.
        lowest, highest: Share of a copy's tokens that are wrong.
        stored_share: Share of copies taken from stored iterates, if there are any.

    Raises:
        ValueError: A number is out of range.
    """

    block_size: int = 24
    num_passes: int = 3
    window: int = 4
    lowest: float = 0.25
    highest: float = 1.0
    stored_share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("block_size", "num_passes", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.lowest <= self.highest <= 1:
            raise ValueError(f"shares of noise must rise within 0 and 1, got {self.lowest} to {self.highest}")
        if not 0 <= self.stored_share <= 1:
            raise ValueError(f"stored_share must be between 0 and 1, got {self.stored_share}")


def progressive_ratio(block: int, options: NoiseOptions) -> float:
    """Share of wrong tokens in block number ``block``: rises linearly along the window, then starts over."""
    if options.window == 1:
        return options.highest
    step = (options.highest - options.lowest) / (options.window - 1)
    return options.lowest + step * (block % options.window)


def noised(
    answer_ids: Sequence[int],
    places: range,
    ratio: float,
    source: Sequence[int],
    rng: random.Random,
) -> list[int]:
    """A guess at the tokens of ``answer_ids`` at ``places``, the last ``ratio`` of which is wrong.

    The errors imitate those of Jacobi iterates: other tokens of the text, one token repeated, the right
    tokens at shifted positions, or right and wrong ones mixed.

    Args:
        answer_ids: The right tokens.
        places: Consecutive positions to guess; the answer may end before the last.
        ratio: Share of them that may be wrong.
        source: Tokens wrong guesses are drawn from.
        rng: The source of randomness.
    """
    start = places.start
    right = list(answer_ids[start : places.stop])
    num_right = round(len(right) * (1 - ratio))
    kind = rng.randrange(4)
    if kind == 0:
        wrong = rng.choices(source, k=len(right) - num_right)
    elif kind == 1:
        before = start + num_right - 1
        token = answer_ids[before] if before >= 0 and rng.random() < 0.7 else rng.choice(source)
        wrong = [token] * (len(right) - num_right)
    elif kind == 2:
        shift = rng.choice((-1, 1)) * rng.randrange(1, _MOST_SHIFT + 1)
        first = max(0, start + num_right + shift)
        wrong = list(answer_ids[first : first + len(right) - num_right])
        wrong += rng.choices(source, k=len(right) - num_right - len(wrong))
    else:
        wrong = [token if rng.random() < 0.5 else rng.choice(source) for token in right[num_right:]]
    return right[:num_right] + wrong


def drawn_copies(
    prompt_ids: Sequence[int], answer_ids: Sequence[int], options: NoiseOptions, rng: random.Random
) -> list[Copy]:
    """Copies that cover the answer ``num_passes`` times with random noise."""
    source = [*prompt_ids, *answer_ids]
    copies = []
    for number in range(options.num_passes):
        # The first pass starts where decoding starts; the others at a random offset.
        start = -rng.randrange(options.block_size) if number else 0
        block = rng.randrange(options.window)
        while start < len(answer_ids) - 1:
            first = max(0, start)
            places = range(first, start + options.block_size)
            ratio = progressive_ratio(block, options)
            copies.append(Copy(first, tuple(noised(answer_ids, places, ratio, source, rng))))
            start += options.block_size
            block += 1
    return copies


def stored_copies(
    starts: Sequence[int],
    iterates: Sequence[Sequence[int]],
    answer_ids: Sequence[int],
    options: NoiseOptions,
    rng: random.Random,
    *,
    with_next: bool = False,
) -> list[Copy]:
    """Iterates of a stored trajectory that together cover the answer ``num_passes`` times.

    Each is the one of a few random candidates whose share of wrong tokens is nearest to the schedule's.

    Args:
        starts: Position in the answer of each iterate, in the order of decoding.
        iterates: Their tokens.
        answer_ids: The fixed point.
        options: How many copies, and how noisy.
        rng: The source of randomness.
        with_next: Whether to add the iterate that followed each, as the local loss needs.
    """
    if not iterates:
        return []
    wanted = options.num_passes * max(1, round(len(answer_ids) / options.block_size))
    block = rng.randrange(options.window)
    chosen: list[int] = []
    for number in range(min(wanted, len(iterates))):
        candidates = rng.choices(range(len(iterates)), k=_NUM_CANDIDATES)
        if number == 0:
            candidates.append(0)  # the block that decoding starts with
        ratio = progressive_ratio(block + number, options)
        chosen.append(
            min(
                candidates,
                key=lambda place: abs(wrong_share(starts[place], iterates[place], answer_ids) - ratio),
            )
        )
    copies: list[Copy] = []
    for place in dict.fromkeys(chosen):
        has_next = with_next and place + 1 < len(iterates)
        copies.append(
            Copy(starts[place], tuple(iterates[place]), next_copy=len(copies) + 1 if has_next else None)
        )
        if has_next:
            copies.append(Copy(starts[place + 1], tuple(iterates[place + 1])))
    return copies


def wrong_share(start: int, guess: Sequence[int], answer_ids: Sequence[int]) -> float:
    """Share of guesses within the answer that are wrong."""
    pairs = list(zip(guess, answer_ids[start:], strict=False))
    return sum(one != other for one, other in pairs) / len(pairs) if pairs else 0.0


_BUCKET_BATCHES = 24


class Joined(Sequence[Trajectory]):
    """Several sequences of trajectories as one, without copying.

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
    """Tokens of each trajectory, without reading stored ones from disk."""
    known: list[int] | None = getattr(trajectories, "lengths", None)
    return known or [trajectory.num_tokens for trajectory in trajectories]


class NoisyExamples(Dataset[Example]):
    """``num_items`` training examples, drawn from trajectories.

    Every pass over the trajectories has another order; examples of similar length share a batch, to reduce
    padding. Item ``k`` is the same whatever was requested before.

    Args:
        trajectories: The trajectories to draw from.
        num_items: Number of items: steps times rows per step.
        batch_size: Rows per forward.
        noise: How copies are made; ``None`` for clean text only.
        with_next: Whether to add the next iterate to stored ones, as the local loss needs.
        learned_prompts: Share of examples whose prompt text is learned too.
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
        """Packed tokens of an example, averaged over the first ``num_sampled``."""
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
