"""Drafters by name. Each module holds one; none of them knows the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from local_backend.drafters.autoregressive import Autoregressive
from local_backend.drafters.base import AskingDrafter, Drafter, WritingRow
from local_backend.drafters.combined import Combined
from local_backend.drafters.guess_tokens import GuessTokens
from local_backend.drafters.jacobi import Jacobi
from local_backend.drafters.lookahead import Lookahead
from local_backend.drafters.reference_copy import ReferenceCopy
from local_backend.drafters.span_copy import SpanCopy


def _jacobi(guess_token_ids: Sequence[int]) -> Drafter:
    return GuessTokens(guess_token_ids) if guess_token_ids else Jacobi()


_BY_NAME: dict[str, Callable[[Sequence[int]], Drafter]] = {
    "autoregressive": lambda _: Autoregressive(),
    "combined": lambda guesses: Combined([ReferenceCopy(), _jacobi(guesses), Lookahead()]),
    "jacobi": _jacobi,
    "lookahead": lambda _: Lookahead(),
    "reference_copy": lambda _: ReferenceCopy(),
    "span_copy": lambda _: SpanCopy(),
}


def drafter_of(drafter: str | Drafter, guess_token_ids: Sequence[int] = ()) -> Drafter:
    """The drafter of that name, or the one given.

    Args:
        drafter: A name or a drafter.
        guess_token_ids: Those that the model was trained with, for one made by name; see
            :class:`~local_backend.drafters.guess_tokens.GuessTokens`.

    Raises:
        ValueError: No drafter has that name.
        TypeError: What was given is no drafter.
    """
    if isinstance(drafter, str):
        if drafter not in _BY_NAME:
            raise ValueError(f"no drafter is named {drafter!r}; there are {', '.join(sorted(_BY_NAME))}")
        return _BY_NAME[drafter](guess_token_ids)
    if not isinstance(drafter, Drafter):
        raise TypeError(f"a drafter has propose() and observe(), got {type(drafter).__name__}")
    return drafter


__all__ = [
    "AskingDrafter",
    "Autoregressive",
    "Combined",
    "Drafter",
    "GuessTokens",
    "Jacobi",
    "Lookahead",
    "ReferenceCopy",
    "SpanCopy",
    "WritingRow",
    "drafter_of",
]
