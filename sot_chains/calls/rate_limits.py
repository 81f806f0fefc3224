"""Rate limits of an account, shared by all chains that use it: requests, tokens and concurrent calls.

Calls wait in one queue, ordered by question and then by arrival, so that earlier questions finish first.
Only the first in the queue checks the limits; the others sleep until their turn, so thousands of them cost
nothing. ``asyncio-throttle`` counts requests, a :class:`~sot_chains.calls.windows.Window` tokens.

The server counts a request when it arrives, which nobody tells, and output tokens as it writes them. What is
seen here is never earlier: the beginning of the response, and its text. So these are the moments from which
both count. Until they are written, room is kept for as many output tokens as are expected.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import uuid4
from weakref import WeakValueDictionary

from sot_chains.calls.windows import Requests, Reservation, Window
from sot_chains.providers.base import Delta, ProviderError
from sot_chains.providers.errors import wait_too_long

_log = logging.getLogger(__name__)
_numbers = itertools.count()
_LONG_SECONDS = 5.0
_UNLIMITED = sys.maxsize
_CHARACTERS = 4  # of a token, as long as the server has not counted them
_LONGER = 1.01  # than the window of the server, for what its clock and ours do not agree in


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
        for name in ("requests_per_minute", "max_concurrent", "window_seconds", *_PER_MINUTE.values()):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}; omit it for no limit")


_TOKENS = ("tokens", "input_tokens", "output_tokens")
_PER_MINUTE = {name: f"{name}_per_minute" for name in _TOKENS}


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
        self._closed_until = self._asked_seconds = self._told_until = 0.0
        self._requests = Requests(0)
        self._windows = {name: Window(0, 0.0) for name in _TOKENS}
        self._counted: dict[str, Requests | Window] = {"requests": self._requests, **self._windows}
        self.change(limits)

    def __deepcopy__(self, memo: object) -> Limiter:
        return self

    def __reduce__(self) -> tuple[Callable[[Limits, Hashable], Limiter], tuple[Limits, Hashable]]:
        return _find_limiter, (self.limits, self._key)

    def change(self, limits: Limits) -> None:
        """Switches to ``limits``. What was sent in this window still counts."""
        with self._lock:
            self.limits = limits
            self._requests.rate_limit = limits.requests_per_minute or _UNLIMITED
            for name, window in self._windows.items():
                window.limit = getattr(limits, _PER_MINUTE[name]) or _UNLIMITED
                window.seconds = limits.window_seconds * _LONGER
            self._requests.period = limits.window_seconds * _LONGER

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
        output_tokens: Callable[[], tuple[int, int]] = lambda: (0, 0),
        *,
        longest_wait_seconds: float = float("inf"),
    ) -> Reservation:
        """Waits until the limits allow the call; returns what it reserves, for :meth:`release`.

        How many ``output_tokens`` count at once, as a bound does at OpenAI, and how many are expected, is
        asked when it is its turn, since others have ended meanwhile.
        """
        waiter = _Waiter(question, next(_numbers), asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._check_pause(longest_wait_seconds)
            heapq.heappush(self._queue, waiter)
            self._choose_first()
        try:
            while True:
                seconds: float | None = None  # until it is woken: by a call that ends, or when it is its turn
                with self._lock:
                    if self._first is waiter:
                        wanted = self._wanted(input_tokens, *output_tokens())
                        closed = self._seconds_closed(wanted, longest_wait_seconds)
                        is_full = self.num_running >= (self.limits.max_concurrent or _UNLIMITED)
                        seconds = None if is_full else closed
                if seconds == 0:
                    await self._requests.acquire()  # type: ignore[no-untyped-call]  # it has no annotations
                    with self._lock:
                        self.num_running += 1
                        _kept[self] = time.monotonic() + 2 * self.limits.window_seconds
                        for name, window in self._windows.items():
                            window.in_flight += wanted[name]
                        num_expired = {name: one.num_expired for name, one in self._counted.items()}
                    return Reservation(time.monotonic(), wanted, num_expired)
                self._tell(seconds or 0.0)
                with suppress(TimeoutError):
                    await asyncio.wait_for(waiter.turn.wait(), seconds)
                waiter.turn.clear()
        finally:
            self._leave(waiter)

    def _wanted(self, num_in: int, num_bound: int, num_out: int) -> dict[str, int]:
        wanted = dict(zip(_TOKENS, (num_in + num_bound, num_in, num_out), strict=True))
        for name, window in self._windows.items():
            if wanted[name] > window.limit:
                raise ProviderError(
                    f"a request of about {wanted[name]} tokens can never be sent under {_PER_MINUTE[name]}="
                    f"{window.limit}; raise the limit, shorten the input or set max_tokens"
                )
        return wanted

    def note(self, delta: Delta, reserved: Reservation | None = None) -> None:
        """Takes in what a response says: that it has begun, what was written, or how the account stands."""
        if delta.pause_seconds and not self.counts_tokens:  # else there is a window for it
            self.pause(delta.pause_seconds)
        if reserved is None:
            return
        with self._lock:
            if not reserved.spent:
                self._begin(reserved)
            if written := delta.text or delta.reasoning:
                self._count_written(reserved, max(1, len(written) // _CHARACTERS))
            for name, left in (delta.remaining or {}).items():  # others may use the account, too
                if getattr(self.limits, f"{name}_per_minute", None):
                    self._counted[name].observe(left, reserved.num_expired[name], time.monotonic())

    def _begin(self, reserved: Reservation) -> None:
        now = time.monotonic()
        self._requests.move(reserved.admitted_at, now)
        for name in _TOKENS[:2]:
            self._windows[name].in_flight -= reserved.expected[name]
            reserved.spent[name] = self._windows[name].spend(reserved.expected[name], now)

    def _count_written(self, reserved: Reservation, num_tokens: int) -> None:
        window, left = self._windows["output_tokens"], reserved.expected["output_tokens"]
        reserved.expected["output_tokens"] = max(left - max(num_tokens, 0), 0)
        window.in_flight -= left - reserved.expected["output_tokens"]
        window.write(num_tokens, time.monotonic())
        reserved.num_written += num_tokens

    def release(self, reserved: Reservation, tokens: tuple[int, int] | None) -> None:
        """Ends a call. ``tokens``, input and output, replace what it has reserved; ``None`` keeps that."""
        with self._lock:
            self.num_running -= 1
            if not reserved.spent:
                self._begin(reserved)
            if tokens is not None:
                self._windows["tokens"].correct(reserved.spent["tokens"], sum(tokens))
                self._windows["input_tokens"].correct(reserved.spent["input_tokens"], tokens[0])
                self._count_written(reserved, tokens[1] - reserved.num_written)
            self._windows["output_tokens"].in_flight -= reserved.expected["output_tokens"]
            if self._first:
                self._first.wake()

    def pause(self, seconds: float) -> None:
        """Admits no call for the ``seconds`` that the server asks to wait."""
        until = time.monotonic() + seconds
        with self._lock:
            if seconds > 0 and until > self._closed_until:
                self._closed_until, self._asked_seconds = until, seconds
                _kept[self] = until

    def _check_pause(self, longest_wait_seconds: float) -> float:
        left = self._closed_until - time.monotonic()
        if left > longest_wait_seconds:
            said = f"the server has asked to wait {self._asked_seconds:.0f} s, of which {left:.0f} s are left"
            raise wait_too_long(f"{said}; nothing was sent", left, longest_wait_seconds, is_unbilled=True)
        return left

    def _seconds_closed(self, wanted: dict[str, int], longest_wait_seconds: float) -> float:
        left, now = self._check_pause(longest_wait_seconds), time.monotonic()
        waits = [window.seconds_until(wanted[name], now) for name, window in self._windows.items()]
        return max(left, self._requests.seconds_until_next(now), *waits)

    def _tell(self, seconds: float) -> None:
        """Logs a wait, once for all calls that wait at the same time."""
        if seconds > _LONG_SECONDS and (now := time.monotonic()) >= self._told_until:
            self._told_until = now + seconds
            log_wait(seconds, "the rate limits of the account")

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


# A limiter lives as long as a chain has it, or as long as it restricts calls of whoever comes next.
_limiters: WeakValueDictionary[Hashable, Limiter] = WeakValueDictionary()
_kept: dict[Limiter, float] = {}  # until when
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
        for limiter in [one for one, until in list(_kept.items()) if until < time.monotonic()]:
            _kept.pop(limiter, None)  # its calls in flight belong to a chain, which has it
        return _limiters.setdefault(key, Limiter(limits, key))
