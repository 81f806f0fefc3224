"""Rate limits of an account, shared by all chains that use it: requests, tokens and concurrent calls.

Calls wait in one queue, ordered by question and then by arrival, so that earlier questions finish first.
Only the first in the queue checks the limits; the others sleep until their turn, so thousands of them cost
nothing. ``asyncio-throttle`` counts requests, a :class:`Window` tokens.

Event loops may share an account: the queue belongs to none of them. The usage of other processes is known
only from what the server reports.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from uuid import uuid4

from asyncio_throttle.throttler import Throttler

from sot_chains.providers.base import ProviderError

_log = logging.getLogger(__name__)
_numbers = itertools.count()
_LONG_SECONDS = 5.0
_UNLIMITED = sys.maxsize


@dataclass(frozen=True)
class Limits:
    """Rate limits of an account. ``None`` means no limit.

    Attributes:
        requests_per_minute: Requests started in any window of ``window_seconds``, retries included.
        tokens_per_minute: Tokens in any such window: estimated when a call starts, corrected when its usage
            is known.
        max_concurrent: Calls in flight at once.
        key: Names the account. Chains with the same key share the limits. Without a key, chains share them
            if they call the same model on the same server with the same API key, or if they use this same
            object with a LangChain model.
        window_seconds: Length of the window; change it if the vendor does not count per minute.

    Raises:
        ValueError: A limit is not positive.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    key: str | None = None
    window_seconds: float = 60.0
    _identity: str = field(default_factory=lambda: uuid4().hex, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent", "window_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}; omit it for no limit")


@dataclass(slots=True)
class Spent:
    """Tokens reserved at one moment, corrected once the server reports the actual number."""

    at: float
    tokens: int
    counts: bool = True


class Window:
    """At most ``limit`` tokens in any window of ``seconds``. Pure: the caller passes the time.

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
        """Reserves ``tokens``."""
        spent = Spent(now, tokens)
        self._spent.append(spent)
        self._total += tokens
        return spent

    def correct(self, spent: Spent, tokens: int) -> None:
        """Replaces the reserved tokens by those actually used."""
        self._total += (tokens - spent.tokens) * spent.counts
        spent.tokens = tokens


@dataclass(slots=True, order=True)
class _Waiter:
    """A call in the queue; ordered by question, then by arrival."""

    question: int
    number: int
    loop: asyncio.AbstractEventLoop = field(compare=False)
    turn: asyncio.Event = field(compare=False)

    def wake(self) -> bool:
        """Wakes the waiter to check the limits again; ``False`` if its event loop is closed."""
        try:
            self.loop.call_soon_threadsafe(self.turn.set)
        except RuntimeError:
            return False
        return True


class Limiter:
    """Admits the calls of one account in order, within its limits.

    Copies share this limiter; unpickled, it is the limiter with the same key in the process that reads it.
    """

    def __init__(self, limits: Limits, key: Hashable | None = None) -> None:
        self.num_running = 0
        self._key = key
        self._lock = threading.Lock()
        self._queue: list[_Waiter] = []
        self._first: _Waiter | None = None  # the one that checks the limits
        self._closed_until = self._asked_seconds = 0.0
        self._requests = Throttler(0)
        self._tokens = Window(0, 0.0)
        self.change(limits)

    def __deepcopy__(self, memo: object) -> Limiter:
        return self

    def __reduce__(self) -> tuple[Callable[[Limits, Hashable], Limiter], tuple[Limits, Hashable]]:
        return _find_limiter, (self.limits, self._key)

    def change(self, limits: Limits) -> None:
        """Switches to ``limits``. What was sent in this window still counts."""
        # The delay between admitting a call and the server counting its request varies; the longer window
        # absorbs the difference.
        seconds = limits.window_seconds + min(0.01 * limits.window_seconds, 0.25)
        with self._lock:
            self.limits = limits
            self._requests.rate_limit = limits.requests_per_minute or _UNLIMITED
            self._tokens.limit = limits.tokens_per_minute or _UNLIMITED
            self._requests.period = self._tokens.seconds = seconds

    @property
    def counts_tokens(self) -> bool:
        """Whether calls must state how many tokens they expect to use."""
        return self.limits.tokens_per_minute is not None

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing restricts calls now: no limits, and no pause that the server asked for."""
        said = self.limits
        is_limited = said.requests_per_minute or said.tokens_per_minute or said.max_concurrent
        return not is_limited and self._closed_until <= time.monotonic()

    async def admit(
        self, question: int, tokens: int = 0, *, longest_wait_seconds: float = float("inf")
    ) -> Spent:
        """Waits until the limits allow the call; returns what it reserves, for :meth:`release`.

        Args:
            question: The number of the call's question, from :func:`next_question`; lower ones go first.
            tokens: Tokens the call is expected to use, input and output together.
            longest_wait_seconds: The longest pause of the server that is waited out.

        Raises:
            ProviderError: ``tokens`` exceeds the limit, so the call could never start, or the server has
                asked for a longer pause.
        """
        if tokens > self._tokens.limit:
            raise ProviderError(
                f"a request of about {tokens} tokens can never be sent under tokens_per_minute="
                f"{self._tokens.limit}; raise the limit, shorten the input or set max_tokens"
            )
        waiter = _Waiter(question, next(_numbers), asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._check_pause(longest_wait_seconds)
            heapq.heappush(self._queue, waiter)
            self._choose_first()
        try:
            while True:
                with self._lock:
                    is_first = self._first is waiter
                    seconds = self._seconds_closed(tokens, longest_wait_seconds) if is_first else 0.0
                    is_full = self.num_running >= (self.limits.max_concurrent or _UNLIMITED)
                if seconds > 0:
                    log_wait(seconds, "the rate limits of the account")
                    await asyncio.sleep(seconds)
                elif is_full or not is_first:
                    await waiter.turn.wait()
                    waiter.turn.clear()
                else:  # last, since a request counts from the moment at which it is admitted
                    await self._count_request(waiter.loop)
                    with self._lock:  # the server may have asked for a pause meanwhile
                        if self._seconds_closed(tokens, longest_wait_seconds) <= 0:
                            self.num_running += 1
                            return self._tokens.spend(tokens, time.monotonic())
        finally:
            self._leave(waiter)

    def release(self, spent: Spent, tokens: int | None) -> None:
        """Ends a call. ``tokens`` replaces the estimate that it has reserved; ``None`` keeps it."""
        with self._lock:
            self.num_running -= 1
            if tokens is not None:
                self._tokens.correct(spent, tokens)
            if self._first:
                self._first.wake()

    def pause(self, seconds: float) -> None:
        """Admits no call for the ``seconds`` that the server asks to wait."""
        until = time.monotonic() + seconds
        with self._lock:
            if seconds > 0 and until > self._closed_until:
                self._closed_until, self._asked_seconds = until, seconds

    def _check_pause(self, longest_wait_seconds: float) -> float:
        """Seconds left of the pause that the server has asked for; raises if they are too many."""
        left = self._closed_until - time.monotonic()
        if left > longest_wait_seconds:
            raise ProviderError(
                f"the server has asked to wait {self._asked_seconds:.0f} s, of which {left:.0f} s are left; "
                f"nothing was sent. Ask again then, or wait with Retries(longest_wait_seconds=...), now "
                f"{longest_wait_seconds:g}",
                is_retryable=True,
                is_unbilled=True,
                retry_after_seconds=left,
            )
        return left

    def _seconds_closed(self, tokens: int, longest_wait_seconds: float) -> float:
        left = self._check_pause(longest_wait_seconds)
        return max(left, self._tokens.seconds_until(tokens, time.monotonic()))

    async def _count_request(self, loop: asyncio.AbstractEventLoop) -> None:
        note = loop.call_later(_LONG_SECONDS, _log.warning, "waiting: requests_per_minute is used up")
        try:
            await self._requests.acquire()  # type: ignore[no-untyped-call]  # it has no annotations
        finally:
            note.cancel()

    def _choose_first(self) -> None:
        while self._first is None and self._queue:
            waiter = heapq.heappop(self._queue)
            if waiter.wake():
                self._first = waiter

    def _leave(self, waiter: _Waiter) -> None:
        with self._lock:
            if self._first is waiter:
                self._first = None
                self._choose_first()
            else:  # cancelled while waiting
                self._queue.remove(waiter)
                heapq.heapify(self._queue)


def log_wait(seconds: float, reason: str) -> None:
    """Logs a wait that somebody might take for a hang."""
    if seconds > _LONG_SECONDS:
        _log.warning("waiting %.0f s: %s", seconds, reason)


def next_question() -> int:
    """The number of a new question; calls of lower numbers are admitted first."""
    return next(_numbers)


_limiters: dict[Hashable, Limiter] = {}
_limiters_lock = threading.Lock()


def limiter_for(limits: Limits | None, account: Hashable | None) -> Limiter | None:
    """The limiter shared by all chains with the same key; the newest limits apply to all of them.

    It is ``None`` if there is nothing to enforce: neither limits nor an account, which LangChain models lack,
    whose server may ask for pauses.
    """
    if limits is None and account is None:
        return None
    key = (limits and limits.key) or account or (limits and limits._identity)
    limiter = _find_limiter(limits or Limits(), key)
    if limits is not None and limiter.limits != limits:
        limiter.change(limits)
    return limiter


def _find_limiter(limits: Limits, key: Hashable | None) -> Limiter:
    """The limiter with ``key``, whatever its limits; if there is none, a new one with ``limits``."""
    if key is None:
        return Limiter(limits)
    with _limiters_lock:
        return _limiters.setdefault(key, Limiter(limits, key))
