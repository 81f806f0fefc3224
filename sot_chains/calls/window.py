"""Requests or tokens spent in a sliding window. Pure: the caller passes the time, and nothing waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class Spent:
    """Units reserved at one moment; tokens are corrected once the server reports the actual number."""

    at: float
    units: int


class Window:
    """At most ``limit`` units, requests or tokens, in any window of ``seconds``.

    A leaky bucket would allow up to twice the limit in one window (its saved capacity plus the refill), so
    every reservation is kept for a whole window.

    Args:
        limit: Units in a window.
        seconds: Length of a window.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit = limit
        self.seconds = seconds
        self.total = 0
        self._spent: deque[Spent] = deque()

    def seconds_until(self, units: int, now: float) -> float:
        """Seconds until ``units`` fit; ``0.0`` if they fit now.

        More units than the limit never fit: for those, the seconds until the window is empty.
        """
        missing = units - self.num_left(now)
        if missing <= 0 or not self._spent:
            return 0.0
        for spent in self._spent:
            missing -= spent.units
            if missing <= 0:
                break
        return max(spent.at + self.seconds - now, 0.0) or 1e-4  # exactly at the edge it still counts

    def num_left(self, now: float) -> int:
        """Units that fit now; negative if more were used than reserved."""
        while self._spent and now - self._spent[0].at > self.seconds:
            self.total -= self._spent.popleft().units
        return self.limit - self.total

    def spend(self, units: int, now: float) -> Spent:
        """Reserves ``units``."""
        spent = Spent(now, units)
        self._spent.append(spent)
        self.total += units
        return spent

    def correct(self, spent: Spent, units: int) -> None:
        """Replaces the reserved units by those actually used."""
        if any(one is spent for one in self._spent):
            self.total += units - spent.units
        spent.units = units
