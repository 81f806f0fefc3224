"""HTTP for the vendors' SDKs: one client per event loop, and parsing of rate-limit and retry headers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from weakref import WeakKeyDictionary

from sot_chains.providers.base import RateLimits

_Clients = dict[Hashable, Any]
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[_Clients, AsyncGenerator[None, None]]] = (
    WeakKeyDictionary()
)


async def client_of(settings: Hashable, make: Callable[[], Any]) -> Any:
    """The running loop's client with ``settings``; if there is none yet, ``make`` creates it."""
    loop = asyncio.get_running_loop()
    if loop not in _loops:
        for closed in [other for other in list(_loops) if other.is_closed()]:
            del _loops[closed]  # its connections refer to it, so it would never be collected
        clients: _Clients = {}
        lifetime = _lifetime(clients)
        _loops[loop] = clients, lifetime
        await anext(lifetime)
    clients, _ = _loops[loop]
    if settings not in clients:
        clients[settings] = make()
    return clients[settings]


async def close_clients() -> None:
    """Closes every connection that named models have open on the running event loop.

    ``asyncio.run`` does this when it ends. Call it in a long-lived loop while no closed models are needed.
    Calls in flight fail.
    """
    if opened := _loops.pop(asyncio.get_running_loop(), None):
        _, lifetime = opened
        await lifetime.aclose()


async def _lifetime(clients: _Clients) -> AsyncGenerator[None, None]:
    """Closes the clients of a loop before it closes: a loop finalises its async generators by itself.

    (``loop.shutdown_asyncgens``, which ``asyncio.run`` calls.)
    """
    try:
        yield
    finally:
        while clients:
            _, client = clients.popitem()
            await client.close()


_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def rate_limits_of(headers: Mapping[str, str]) -> RateLimits | None:
    """The rate limits in ``headers``; ``None`` if there are none."""
    for name, seconds_of in _LIMIT_HEADERS:
        limits = RateLimits(
            requests=_whole(headers.get(name.format(field="limit", unit="requests"))),
            requests_left=_whole(headers.get(name.format(field="remaining", unit="requests"))),
            requests_reset_seconds=seconds_of(headers.get(name.format(field="reset", unit="requests"))),
            tokens=_whole(headers.get(name.format(field="limit", unit="tokens"))),
            tokens_left=_whole(headers.get(name.format(field="remaining", unit="tokens"))),
            tokens_reset_seconds=seconds_of(headers.get(name.format(field="reset", unit="tokens"))),
        )
        if limits != RateLimits():
            return limits
    return None


def retry_after_seconds_of(headers: Mapping[str, str]) -> float | None:
    """The wait that ``headers`` ask for: ``retry-after-ms``, or ``retry-after`` as seconds or as a date."""
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    if (seconds := _number(value)) is not None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(value or "").timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _whole(value: str | None) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _duration(value: str | None) -> float | None:
    """Seconds from ``"6m0s"``, ``"20ms"`` or a plain number of seconds."""
    if value and _PART.sub("", value) == "":
        return sum(float(amount) * _SECONDS[unit] for amount, unit in _PART.findall(value))
    return _number(value)


def _until(value: str | None) -> float | None:
    """Seconds until the ISO 8601 time ``value``."""
    try:
        moment = datetime.fromisoformat(value or "")
    except ValueError:
        return None
    return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


_LIMIT_HEADERS = (("x-ratelimit-{field}-{unit}", _duration), ("anthropic-ratelimit-{unit}-{field}", _until))
