"""N-grams seen lately, by their first token.

Knows token ids only. Where the n-grams come from, text or guesses, is the drafter's business.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramPool:
    """For each token the last few continuations seen behind it.

    Args:
        num_tokens: Length of an n-gram, its first token included.
        num_kept: Continuations kept for each first token; the oldest goes first.
    """

    def __init__(self, num_tokens: int, num_kept: int) -> None:
        self._num_tokens = num_tokens
        self._num_kept = num_kept
        self._continuations: dict[int, dict[tuple[int, ...], None]] = {}  # dicts keep the order of insertion
        self._num_read = 0

    def read(self, text: Sequence[int]) -> None:
        """Add the n-grams of a text, from where the last reading of the same text, then shorter, ended."""
        self.add(text[max(0, self._num_read - self._num_tokens + 1) :])
        self._num_read = len(text)

    def add(self, token_ids: Sequence[int]) -> None:
        """Add every n-gram of ``token_ids``."""
        for start in range(len(token_ids) - self._num_tokens + 1):
            continuation = tuple(token_ids[start + 1 : start + self._num_tokens])
            kept = self._continuations.setdefault(token_ids[start], {})
            kept.pop(continuation, None)
            kept[continuation] = None
            if len(kept) > self._num_kept:
                del kept[next(iter(kept))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The continuations of ``token``, the latest first."""
        return list(reversed(self._continuations.get(token, {})))
