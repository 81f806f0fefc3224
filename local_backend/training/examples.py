"""Training examples by index, with noise that is the same for the same index.

Interrupted training resumes with exactly the examples it would have seen. Knows trajectories as columns of
token ids. Does not know models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch.utils.data import Dataset

from local_backend.drafting.drafter import require_at_least
from local_backend.sequences.outputs import Trajectory
from local_backend.training.packing import Copy, Example, num_packed_tokens

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

_MOST_SHIFT = 4
_NUM_CANDIDATES = 3
_BUCKET_BATCHES = 24


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
        require_at_least(1, block_size=self.block_size, num_passes=self.num_passes, window=self.window)
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
    answer_ids: Sequence[int], part: range, ratio: float, source: Sequence[int], rng: random.Random
) -> list[int]:
    """A guess at a part of an answer, the last ``ratio`` of which is wrong, drawn from ``source``.

    The errors imitate those of Jacobi iterates: other tokens of the text, one token repeated, the right
    tokens at shifted positions, or right and wrong ones mixed.
    """
    right = list(answer_ids[part.start : part.stop])
    num_right = round(len(right) * (1 - ratio))
    num_wrong, first_wrong = len(right) - num_right, part.start + num_right
    kind = rng.randrange(4)
    if kind == 0:
        wrong = rng.choices(source, k=num_wrong)
    elif kind == 1:
        follows = first_wrong > 0 and rng.random() < 0.7
        wrong = [answer_ids[first_wrong - 1] if follows else rng.choice(source)] * num_wrong
    elif kind == 2:
        first = max(0, first_wrong + rng.choice((-1, 1)) * rng.randrange(1, _MOST_SHIFT + 1))
        wrong = list(answer_ids[first : first + num_wrong])
        wrong += rng.choices(source, k=num_wrong - len(wrong))
    else:
        wrong = [token if rng.random() < 0.5 else rng.choice(source) for token in right[num_right:]]
    return right[:num_right] + wrong


def drawn_copies(trajectory: Trajectory, options: NoiseOptions, rng: random.Random) -> list[Copy]:
    """Copies that cover the answer ``num_passes`` times with random noise."""
    answer_ids = trajectory.answer_ids
    source = (*trajectory.prompt_ids, *answer_ids)
    copies = []
    for number in range(options.num_passes):
        # The first pass starts where decoding starts; the others at a random offset.
        offset = rng.randrange(options.block_size) if number else 0
        first_block = rng.randrange(options.window)
        starts = range(-offset, len(answer_ids) - 1, options.block_size)
        for block, start in enumerate(starts, first_block):
            part = range(max(0, start), start + options.block_size)
            guess = noised(answer_ids, part, progressive_ratio(block, options), source, rng)
            copies.append(Copy(part.start, tuple(guess)))
    return copies


def stored_copies(
    trajectory: Trajectory, options: NoiseOptions, rng: random.Random, *, with_next: bool = False
) -> list[Copy]:
    """Iterates of a stored trajectory that together cover the answer ``num_passes`` times.

    Each is the one of a few random candidates whose share of wrong tokens is nearest to the schedule's.
    ``with_next`` adds the iterate that followed each, as the local loss needs.
    """
    iterates = [
        Copy(start, guess) for start, guess in zip(trajectory.starts, trajectory.iterates, strict=True)
    ]
    wrong = [wrong_share(each, trajectory.answer_ids) for each in iterates]
    wanted = options.num_passes * max(1, round(len(trajectory.answer_ids) / options.block_size))
    first_block = rng.randrange(options.window)
    chosen: dict[int, None] = {}
    for number in range(min(wanted, len(iterates))):
        candidates = rng.choices(range(len(iterates)), k=_NUM_CANDIDATES)
        if number == 0:
            candidates.append(0)  # the block that decoding starts with
        ratio = progressive_ratio(first_block + number, options)
        chosen[min(candidates, key=lambda candidate: abs(wrong[candidate] - ratio))] = None
    copies: list[Copy] = []
    for number in chosen:
        has_next = with_next and number + 1 < len(iterates)
        copies.append(replace(iterates[number], next_copy=len(copies) + 1 if has_next else None))
        copies += iterates[number + 1 : number + 2] if has_next else ()
    return copies


def wrong_share(copy: Copy, answer_ids: Sequence[int]) -> float:
    """Share of guesses within the answer that are wrong."""
    pairs = list(zip(copy.token_ids, answer_ids[copy.start :], strict=False))
    return sum(one != other for one, other in pairs) / len(pairs) if pairs else 0.0


@dataclass(eq=False)
class NoisyExamples(Dataset[Example]):
    """``num_items`` training examples, drawn from trajectories.

    Every pass over the trajectories has another order; examples of similar length share a batch, to reduce
    padding. Item ``k`` is the same whatever was requested before. Without ``noise`` the text is clean;
    ``with_next`` adds the next iterate to stored ones, as the local loss needs.

    Raises:
        ValueError: There is no trajectory.
    """

    trajectories: SupportsLenAndGetItem[Trajectory]
    num_items: int
    batch_size: int
    noise: NoiseOptions | None = field(kw_only=True)
    with_next: bool = field(default=False, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if not len(self.trajectories):
            raise ValueError("there is nothing to train on: give at least one trajectory")
        self._order = self._draw_order()

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> Example:
        one = self.trajectories[self._order[number]]
        rng, noise = random.Random(f"{self.seed}:{number}"), self.noise
        copies: Sequence[Copy] = ()
        if noise and one.iterates and rng.random() < noise.stored_share:
            copies = stored_copies(one, noise, rng, with_next=self.with_next)
        elif noise:
            copies = drawn_copies(one, noise, rng)
        return Example(one.prompt_ids, one.answer_ids, tuple(copies))

    def mean_tokens(self, num_sampled: int = 64) -> float:
        """Packed tokens of an example, averaged over the first ``num_sampled``."""
        sampled = [num_packed_tokens(self[number]) for number in range(min(num_sampled, len(self)))]
        return sum(sampled) / len(sampled)

    def _draw_order(self) -> list[int]:
        rng = random.Random(f"{self.seed}:order")
        lengths = [self.trajectories[number].num_tokens for number in range(len(self.trajectories))]
        batch_size, bucket_size = self.batch_size, self.batch_size * _BUCKET_BATCHES
        order: list[int] = []
        waiting: list[int] = []
        while len(order) < self.num_items:
            while len(waiting) < bucket_size:
                waiting += rng.sample(range(len(lengths)), len(lengths))
            bucket = sorted(waiting[:bucket_size], key=lengths.__getitem__)
            del waiting[:bucket_size]
            batches = [bucket[at : at + batch_size] for at in range(0, bucket_size, batch_size)]
            rng.shuffle(batches)
            order += [number for batch in batches for number in batch]
        return order[: self.num_items]
