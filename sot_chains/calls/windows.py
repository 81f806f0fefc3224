"""Sliding windows of tokens. Pure: the caller passes the time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class Spent:
    """Tokens reserved at one moment, corrected once the server reports the actual number."""

    at: float
    tokens: int
    counts: bool = True


class Window:
    """At most ``limit`` tokens in any window of ``seconds``.

    A leaky bucket would allow up to twice the limit in one window (its saved capacity plus the refill), so
    every reservation is kept for a whole window.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit = limit
        self.seconds = seconds
        self._spent: deque[Spent] = deque()
        self._total = 0

    def seconds_until(self, tokens: int, now: float) -> float:
        """Seconds until ``tokens``, at most ``limit``, fit; ``0.0`` if they fit now."""
        while self._spent and now - self._spent[0].at > self.seconds:
            expired = self._spent.popleft()
            self._total -= expired.tokens
            expired.counts = False
        missing = tokens - (self.limit - self._total)
        for spent in self._spent if missing > 0 else ():
            missing -= spent.tokens
            if missing <= 0:
                return max(spent.at + self.seconds - now, 0.0) or 1e-4  # exactly at the edge it still counts
        return 0.0

    def spend(self, tokens: int, now: float) -> Spent:
        """Reserves ``tokens`` from ``now`` on, which may be past."""
        spent, place = Spent(now, tokens), len(self._spent)
        while place and self._spent[place - 1].at > now:
            place -= 1
        self._spent.insert(place, spent)
        self._total += tokens
        return spent

    def correct(self, spent: Spent, tokens: int) -> None:
        """Replaces the reserved tokens by those actually used."""
        self._total += (tokens - spent.tokens) * spent.counts
        spent.tokens = tokens

    def observe(self, remaining: int, in_flight: int, now: float) -> None:
        """Counts what others have used, given what the server says is left."""
        if (used_by_others := self.limit - self._total - in_flight - remaining) > 0:
            self.spend(used_by_others, now)
