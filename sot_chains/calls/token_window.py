"""Tokens spent in a sliding window of time. Pure: is told the time, waits for nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class Spent:
    """Tokens reserved at one moment; corrected once the server has said how many they were."""

    at: float
    tokens: int


class TokenWindow:
    """At most ``limit`` tokens in any window of ``seconds``.

    A leaky bucket would let through up to twice the limit in one window (what it had saved up and what it
    refills meanwhile), so every reservation is kept until it is a whole window old.

    Args:
        limit: Tokens in a window.
        seconds: How long a window is.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit = limit
        self.seconds = seconds
        self.total = 0
        self._spent: deque[Spent] = deque()

    def seconds_until(self, tokens: int, now: float) -> float:
        """How long to wait until ``tokens`` fit; ``0.0`` if they do at once.

        Tokens above the limit never fit: the answer is that for an empty window.
        """
        self._forget(now)
        missing = self.total + tokens - self.limit
        if missing <= 0 or not self._spent:
            return 0.0
        for spent in self._spent:
            missing -= spent.tokens
            if missing <= 0:
                break
        return max(spent.at + self.seconds - now, 0.0) or 1e-4  # at the very edge it is still inside

    def spend(self, tokens: int, now: float) -> Spent:
        """Reserves ``tokens``."""
        spent = Spent(now, tokens)
        self._spent.append(spent)
        self.total += tokens
        return spent

    def correct(self, spent: Spent, tokens: int) -> None:
        """Replaces what was reserved by what was used."""
        if any(one is spent for one in self._spent):
            self.total += tokens - spent.tokens
        spent.tokens = tokens

    def _forget(self, now: float) -> None:
        while self._spent and now - self._spent[0].at > self.seconds:
            self.total -= self._spent.popleft().tokens
