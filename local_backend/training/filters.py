"""Which answers are not worth learning from. Knows token ids and text, nothing of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Fault = Literal["empty", "unfinished", "repetitive", "broken", "rejected"]
# The last is given by the caller alone.
FAULTS: tuple[Fault, ...] = ("empty", "unfinished", "repetitive", "broken", "rejected")

_LONGEST_PERIOD = 24
_LEAST_REPEATED_TOKENS = 24
_LEAST_REPEATS = 4


def fault_of(token_ids: Sequence[int], text: str, *, is_finished: bool) -> Fault | None:
    """Why an answer is left out, ``None`` where it is kept.

    Args:
        token_ids: The answer, its end token included.
        text: Its text.
        is_finished: Whether the model ended it; at a cut answer's end there is no fixed point to learn.
    """
    if len(token_ids) < 2 or not text.strip():
        return "empty"
    if is_repetitive(token_ids):
        return "repetitive"
    if not is_finished:
        return "unfinished"
    if "\N{REPLACEMENT CHARACTER}" in text:
        return "broken"
    return None


def is_repetitive(token_ids: Sequence[int]) -> bool:
    """Whether a stretch of the answer says the same few tokens over and over.

    That is a span of at most 24 tokens, four times or more in a row, over 24 tokens or more.
    """
    for period in range(1, _LONGEST_PERIOD + 1):
        run = 0
        wanted = max(_LEAST_REPEATED_TOKENS, period * _LEAST_REPEATS) - period
        for one, other in zip(token_ids, token_ids[period:], strict=False):
            run = run + 1 if one == other else 0
            if run >= wanted:
                return True
    return False
