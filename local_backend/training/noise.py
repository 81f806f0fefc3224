"""Where noisy copies of an answer come from: iterates of a trajectory, or wrong tokens drawn on the spot.

Jacobi Forcing (arXiv 2512.14681) lets the noise rise from block to block along a window and begin anew, so
that a model learns to read guesses that are nearly right as well as those that are all wrong. A stored
iterate is what the model will meet when it decodes; drawn noise costs no decoding and is never stale.

Knows token ids. All randomness comes from the generator handed in.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from local_backend.training.packing import Copy

_MOST_SHIFT = 4
_NUM_CANDIDATES = 3


@dataclass(frozen=True, slots=True)
class NoiseOptions:
    """What the copies of an example look like.

    Attributes:
        block_size: Tokens of a copy.
        num_passes: How often the answer is covered with copies, each time cut elsewhere.
        window: Blocks along which the noise rises from ``lowest`` to ``highest``, then begins anew.
        lowest, highest: Share of a copy's tokens that are wrong.
        stored_share: Share of copies taken from stored iterates, where there are any.

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
    """Share of wrong tokens of the block of that number: linear along the window, then anew."""
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
    """A guess at the tokens of ``answer_ids`` at ``places``, the last ``ratio`` of which went wrong.

    It goes wrong as Jacobi iterates do: other tokens of the text, one token over and over, the right tokens
    at the wrong place, or right and wrong ones mixed.

    Args:
        answer_ids: What is right.
        places: Those guessed, one after another; the answer may end before.
        ratio: Share of them that may be wrong.
        source: Tokens wrong guesses are drawn from.
        rng: Where chance comes from.
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
    """Copies that cover the answer ``num_passes`` times with noise drawn on the spot."""
    source = [*prompt_ids, *answer_ids]
    copies = []
    for number in range(options.num_passes):
        # The first block begins where decoding begins; the others begin anywhere.
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

    Each is the one of a few neighbours whose share of wrong tokens is nearest to what the schedule asks.

    Args:
        starts: Place in the answer of each iterate, in the order of decoding.
        iterates: Their tokens.
        answer_ids: The fixed point.
        options: How many copies, and how noisy.
        rng: Where chance comes from.
        with_next: Whether each comes with the iterate that followed it, as the local loss needs.
    """
    if not iterates:
        return []
    wanted = options.num_passes * max(1, round(len(answer_ids) / options.block_size))
    block = rng.randrange(options.window)
    chosen: list[int] = []
    for number in range(min(wanted, len(iterates))):
        candidates = rng.choices(range(len(iterates)), k=_NUM_CANDIDATES)
        if number == 0:
            candidates.append(0)  # the block decoding begins with
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
