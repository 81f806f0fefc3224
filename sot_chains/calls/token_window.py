"""Tokens spent in a sliding time window. Pure: the caller passes the time, and nothing waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class Spent:
    """Tokens reserved at one moment; corrected once the server reports the actual number."""

    at: float
    tokens: int


class TokenWindow:
    """At most ``limit`` tokens in any window of ``seconds``.

    A leaky bucket would allow up to twice the limit in one window (its saved capacity plus the refill), so
    every reservation is kept for a whole window.

    Args:
        limit: Tokens in a window.
        seconds: Length of a window.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit = limit
        self.seconds = seconds
        self.total = 0
        self._spent: deque[Spent] = deque()

    def seconds_until(self, tokens: int, now: float) -> float:
        """Seconds until ``tokens`` fit; ``0.0`` if they fit now.

        More tokens than the limit never fit: for those, the seconds until the window is empty.
        """
        self._forget(now)
        missing = self.total + tokens - self.limit
        if missing <= 0 or not self._spent:
            return 0.0
        for spent in self._spent:
            missing -= spent.tokens
            if missing <= 0:
                break
        return max(spent.at + self.seconds - now, 0.0) or 1e-4  # exactly at the edge it still counts

    def spend(self, tokens: int, now: float) -> Spent:
        """Reserves ``tokens``."""
        spent = Spent(now, tokens)
        self._spent.append(spent)
        self.total += tokens
        return spent

    def correct(self, spent: Spent, tokens: int) -> None:
        """Replaces the reserved tokens by those actually used."""
        if any(one is spent for one in self._spent):
            self.total += tokens - spent.tokens
        spent.tokens = tokens

    def _forget(self, now: float) -> None:
        while self._spent and now - self._spent[0].at > self.seconds:
            self.total -= self._spent.popleft().tokens
