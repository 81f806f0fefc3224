"""Where the text of an answer ends that several calls write: at stop strings and a number of tokens. Pure.

A model that writes in one piece is told both. The calls of one skeleton are not: a stop string would end the
outline, and a number of tokens would bound every point by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextBound:
    """Ends a text before the first stop string, or after so many tokens.

    Args:
        stop: Strings before which it ends; none of them is empty.
        max_tokens: How many tokens it has at most; ``None`` for no bound.
        count: Counts the tokens of a text.

    Attributes:
        is_over: Whether it has ended, so that all further text is dropped.
        is_out_of_tokens: Whether it has ended at the number of tokens.
    """

    def __init__(
        self, stop: Sequence[str] = (), max_tokens: int | None = None, *, count: Callable[[str], int] = len
    ) -> None:
        self._stop = tuple(stop)
        self._num_left = max_tokens
        self._count = count
        self._held = ""
        self.is_over = False
        self.is_out_of_tokens = False

    def feed(self, text: str) -> str:
        """The text that may be shown once ``text`` has come: a possible beginning of a stop string waits."""
        if self.is_over:
            return ""
        if not self._stop:
            return self._counted(text)
        whole = self._held + text
        ends = [place for one in self._stop if (place := whole.find(one)) >= 0]
        if ends:
            shown = self._counted(whole[: min(ends)])
            self.is_over, self._held = True, ""
            return shown
        num_held = max(_num_begun(whole, one) for one in self._stop)
        self._held = whole[len(whole) - num_held :]
        return self._counted(whole[: len(whole) - num_held])

    def end(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return "" if self.is_over else self._counted(held)

    def _counted(self, text: str) -> str:
        if self._num_left is None or not text:
            return text
        num_tokens = self._count(text)
        if num_tokens <= self._num_left:
            self._num_left -= num_tokens
            return text
        shown = text[: len(text) * self._num_left // num_tokens]
        self._num_left, self._held = 0, ""
        self.is_over = self.is_out_of_tokens = True
        return shown


def _num_begun(text: str, stop: str) -> int:
    """How many of the last characters of ``text`` are the beginning of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
