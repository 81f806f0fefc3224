"""Rate limits of an account, shared by all chains that use it: requests, tokens and concurrent calls.

Calls wait in one queue, ordered by question and then by arrival, so that earlier questions finish first.
Only the first in the queue checks the limits; the others sleep until their turn, so thousands of them cost
nothing. ``asyncio-throttle`` counts requests, a :class:`~sot_chains.calls.windows.Window` tokens.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias
from uuid import uuid4

from asyncio_throttle.throttler import Throttler

from sot_chains.calls.windows import Spent, Window
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
        input_tokens_per_minute: Input tokens alone, without those read from a cache if the vendor does not
            count them.
        output_tokens_per_minute: Output tokens alone, which count from the end of their call on.
        max_concurrent: Calls in flight at once.
        key: Names the account. Chains with the same key share the limits. Without a key, chains share them
            if they call the same model on the same server with the same API key, or if they use this same
            object with a LangChain model.
        window_seconds: Length of the window; change it if the vendor does not count per minute.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    key: str | None = None
    window_seconds: float = 60.0
    _identity: str = field(default_factory=lambda: uuid4().hex, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = ("requests_per_minute", "max_concurrent", "window_seconds", *_PER_MINUTE.values())
        for name in names:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}; omit it for no limit")


_TOKENS = ("tokens", "input_tokens", "output_tokens")
_PER_MINUTE = {name: f"{name}_per_minute" for name in _TOKENS}
Reservation: TypeAlias = dict[str, Spent]  # in each window


@dataclass(slots=True, order=True)
class _Waiter:
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
        self._windows = {name: Window(0, 0.0) for name in _TOKENS}
        self._in_flight = dict.fromkeys(_TOKENS, 0)
        self.change(limits)

    def __deepcopy__(self, memo: object) -> Limiter:
        return self

    def __reduce__(self) -> tuple[Callable[[Limits, Hashable], Limiter], tuple[Limits, Hashable]]:
        return _find_limiter, (self.limits, self._key)

    def change(self, limits: Limits) -> None:
        """Switches to ``limits``. What was sent in this window still counts."""
        # The delay between admitting a call and the server counting its request varies; the longer window
        # absorbs the difference.
        seconds = limits.window_seconds + min(0.03 * limits.window_seconds, 0.5)
        with self._lock:
            self.limits = limits
            self._requests.rate_limit = limits.requests_per_minute or _UNLIMITED
            self._requests.period = seconds
            for name, window in self._windows.items():
                window.limit, window.seconds = getattr(limits, _PER_MINUTE[name]) or _UNLIMITED, seconds

    @property
    def counts_tokens(self) -> bool:
        """Whether calls must state how many tokens they expect to use."""
        return any(getattr(self.limits, _PER_MINUTE[name]) for name in _TOKENS)

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing restricts calls now: no limits, and no pause that the server asked for."""
        is_limited = self.limits.requests_per_minute or self.limits.max_concurrent or self.counts_tokens
        return not is_limited and self._closed_until <= time.monotonic()

    async def admit(
        self,
        question: int,
        input_tokens: int = 0,
        output_tokens: int = 0,
        *,
        longest_wait_seconds: float = float("inf"),
    ) -> Reservation:
        """Waits until the limits allow the call; returns what it reserves, for :meth:`release`."""
        wanted = dict(zip(_TOKENS, (input_tokens + output_tokens, input_tokens, output_tokens), strict=True))
        for name, window in self._windows.items():
            if wanted[name] > window.limit:
                raise ProviderError(
                    f"a request of about {wanted[name]} tokens can never be sent under {_PER_MINUTE[name]}="
                    f"{window.limit}; raise the limit, shorten the input or set max_tokens"
                )
        waiter = _Waiter(question, next(_numbers), asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._check_pause(longest_wait_seconds)
            heapq.heappush(self._queue, waiter)
            self._choose_first()
        is_told = False
        try:
            while True:
                with self._lock:
                    is_first = self._first is waiter
                    seconds = self._seconds_closed(wanted, longest_wait_seconds) if is_first else 0.0
                    is_full = self.num_running >= (self.limits.max_concurrent or _UNLIMITED)
                if seconds > 0:
                    if not is_told:
                        log_wait(seconds, "the rate limits of the account")
                    is_told = True
                    waiter.turn.clear()
                    with suppress(TimeoutError):  # a call that ends may give back what it has reserved
                        await asyncio.wait_for(waiter.turn.wait(), seconds)
                elif is_full or not is_first:
                    await waiter.turn.wait()
                    waiter.turn.clear()
                else:  # last, since a request counts from the moment at which it is admitted
                    await self._count_request(waiter.loop)
                    with self._lock:  # the server may have asked for a pause meanwhile
                        if self._seconds_closed(wanted, longest_wait_seconds) <= 0:
                            self.num_running += 1
                            return self._reserve(wanted)
        finally:
            self._leave(waiter)

    def _reserve(self, wanted: dict[str, int]) -> Reservation:
        now = time.monotonic()
        for name, tokens in wanted.items():
            self._in_flight[name] += tokens
        return {name: window.spend(wanted[name], now) for name, window in self._windows.items()}

    def release(self, reserved: Reservation, tokens: tuple[int, int] | None) -> None:
        """Ends a call. ``tokens``, input and output, replace what it has reserved; ``None`` keeps that."""
        with self._lock:
            self.num_running -= 1
            for name, spent in reserved.items():
                self._in_flight[name] -= spent.tokens
            if tokens is not None:
                self._windows["tokens"].correct(reserved["tokens"], sum(tokens))
                self._windows["input_tokens"].correct(reserved["input_tokens"], tokens[0])
                # They are counted as they are written: most of them in the later part of the call.
                written, begun, now = (
                    self._windows["output_tokens"],
                    reserved["output_tokens"],
                    time.monotonic(),
                )
                written.correct(begun, 0)
                written.spend(tokens[1], begun.at + 0.75 * (now - begun.at))
            if self._first:
                self._first.wake()

    def pause(self, seconds: float) -> None:
        """Admits no call for the ``seconds`` that the server asks to wait."""
        until = time.monotonic() + seconds
        with self._lock:
            if seconds > 0 and until > self._closed_until:
                self._closed_until, self._asked_seconds = until, seconds

    def observe(self, remaining: Mapping[str, int], pause_seconds: float) -> None:
        """Takes in what is left of the limits, as the server says: others may use the account, too."""
        if not self.counts_tokens:  # else there is a window for it
            self.pause(pause_seconds)
        with self._lock:
            for name, window in self._windows.items():
                if name in remaining and window.limit != _UNLIMITED:
                    window.observe(remaining[name], self._in_flight[name], time.monotonic())

    def _check_pause(self, longest_wait_seconds: float) -> float:
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

    def _seconds_closed(self, wanted: dict[str, int], longest_wait_seconds: float) -> float:
        left, now = self._check_pause(longest_wait_seconds), time.monotonic()
        waits = [window.seconds_until(wanted[name], now) for name, window in self._windows.items()]
        return max(left, *waits)

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
    """The limiter shared by all chains with the same key; the newest limits apply to all of them."""
    if limits is None and account is None:
        return None
    key = (limits and limits.key) or account or (limits and limits._identity)
    limiter = _find_limiter(limits or Limits(), key)
    if limits is not None and limiter.limits != limits:
        limiter.change(limits)
    return limiter


def _find_limiter(limits: Limits, key: Hashable | None) -> Limiter:
    if key is None:
        return Limiter(limits)
    with _limiters_lock:
        return _limiters.setdefault(key, Limiter(limits, key))
