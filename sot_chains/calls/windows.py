"""Sliding windows of requests and tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from asyncio_throttle.throttler import Throttler

_STEPS = 500  # of a window: what is written in one of them is one entry


@dataclass(slots=True)
class Spent:
    """Tokens counted from one moment on, corrected once the server reports the actual number."""

    at: float
    tokens: int
    counts: bool = True


class Window:
    """At most ``limit`` tokens in any window of ``seconds``.

    A leaky bucket would allow up to twice the limit in one window (its saved capacity plus the refill), so
    all that is spent is kept for a whole window.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit = limit
        self.seconds = seconds
        self.in_flight = 0  # tokens for which room is kept, since they are still to be spent
        self.num_expired = 0  # tokens, ever
        self._spent: deque[Spent] = deque()
        self._total = 0

    def seconds_until(self, tokens: int, now: float) -> float:
        """Seconds until ``tokens``, at most ``limit``, fit; a window if only the end of a call makes room."""
        while self._spent and now - self._spent[0].at > self.seconds:
            expired = self._spent.popleft()
            self._total -= expired.tokens
            self.num_expired += expired.tokens
            expired.counts = False
        missing = tokens + self.in_flight + self._total - self.limit
        for spent in self._spent if missing > 0 else ():
            missing -= spent.tokens
            if missing <= 0:
                return max(spent.at + self.seconds - now, 0.0) or 1e-4  # exactly at the edge it still counts
        return self.seconds if missing > 0 else 0.0

    def spend(self, tokens: int, now: float) -> Spent:
        """Counts ``tokens`` from now on."""
        self._spent.append(Spent(now, tokens))
        self._total += tokens
        return self._spent[-1]

    def write(self, tokens: int, now: float) -> None:
        """Counts ``tokens`` of which many follow each other, so that those of a moment share an entry."""
        step = self.seconds / _STEPS
        last = self._spent[-1] if self._spent else self.spend(0, now)
        if last.at // step != now // step:
            last = self.spend(0, now)
        last.at = now
        self.correct(last, last.tokens + tokens)

    def correct(self, spent: Spent, tokens: int) -> None:
        """Replaces the tokens that were counted by those actually used."""
        self._total += (tokens - spent.tokens) * spent.counts
        spent.tokens = tokens

    def observe(self, remaining: int, since: int, now: float) -> None:
        """Counts what others have used, given what the server said was left when ``since`` had expired."""
        ours = self._total + self.in_flight + self.num_expired - since
        if (used_by_others := self.limit - ours - remaining) > 0:
            self.spend(used_by_others, now)


@dataclass(slots=True)
class Reservation:
    """What one call takes of the limits."""

    admitted_at: float
    expected: dict[str, int]  # tokens of each kind, as long as they are not spent
    num_expired: dict[str, int]  # before it was admitted, by limit
    spent: dict[str, Spent] = field(default_factory=dict)  # once the response has begun
    num_written: int = 0  # output tokens that were read by now


class Requests(Throttler):
    """Counts requests, from when their responses begin, and those of others."""

    num_expired = 0

    def flush(self) -> None:
        """Drops what is older than the window."""
        before = len(self._task_logs)
        super().flush()  # type: ignore[no-untyped-call]  # it has no annotations
        self.num_expired += before - len(self._task_logs)

    def seconds_until_next(self, now: float) -> float:
        """Seconds until a request may be sent, for which it would poll."""
        self.flush()
        is_full = len(self._task_logs) >= self.rate_limit
        return max(self._task_logs[0] + self.period - now, 1e-4) if is_full else 0.0

    def move(self, at: float, now: float) -> None:
        """Counts the request that was admitted ``at`` from now on."""
        if place := bisect_right(self._task_logs, at):  # else it has expired by now
            del self._task_logs[place - 1]
        self._task_logs.append(now)

    def observe(self, remaining: int, since: int, now: float) -> None:
        """Counts what others have sent; see :meth:`Window.observe`."""
        ours = len(self._task_logs) + self.num_expired - since
        self._task_logs.extend([now] * (self.rate_limit - ours - remaining))
