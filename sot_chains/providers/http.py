"""HTTP for the vendors' SDKs: one client per event loop, and parsing of rate-limit and retry headers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from sot_chains.providers.base import RateLimits


class Closable(Protocol):
    """What all vendors' clients have in common."""

    async def close(self) -> None:
        """Closes the client's connections."""
        ...


ClientT = TypeVar("ClientT", bound=Closable)


class ClientsByLoop(Generic[ClientT]):
    """The clients of one vendor, by event loop."""

    def __init__(self) -> None:
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Clients[ClientT]] = WeakKeyDictionary()
        _vendors.append(self)

    async def get(self, settings: Hashable, make: Callable[[], ClientT]) -> ClientT:
        """The running loop's client with ``settings``; if there is none yet, ``make`` creates it."""
        loop = asyncio.get_running_loop()
        if (clients := self._loops.get(loop)) is None:
            for closed in [other for other in list(self._loops) if other.is_closed()]:
                del self._loops[closed]  # its connections refer to it, so it would never be collected
            clients = self._loops[loop] = _Clients()
            await anext(clients.lifetime)
        return clients.get(settings, make)

    async def close(self) -> None:
        """Closes the clients of the running loop; the next request creates new ones."""
        if clients := self._loops.pop(asyncio.get_running_loop(), None):
            await clients.lifetime.aclose()


_vendors: list[ClientsByLoop[Any]] = []


async def close_clients() -> None:
    """Closes every connection that named models have open on the running event loop.

    ``asyncio.run`` does this when it ends. Call it in a long-lived loop while no closed models are needed.
    Calls in flight fail.
    """
    for clients in _vendors:
        await clients.close()


class _Clients(Generic[ClientT]):
    """The clients of one loop.

    Their lifetime is an async generator, since a loop finalises those before it closes
    (``loop.shutdown_asyncgens``, which ``asyncio.run`` calls).
    """

    def __init__(self) -> None:
        self._clients: dict[Hashable, ClientT] = {}
        self.lifetime = self._live(self._clients)

    def get(self, settings: Hashable, make: Callable[[], ClientT]) -> ClientT:
        if (client := self._clients.get(settings)) is None:
            client = self._clients[settings] = make()
        return client

    @staticmethod
    async def _live(clients: dict[Hashable, ClientT]) -> AsyncGenerator[None, None]:
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
    if "x-ratelimit-limit-requests" in headers or "x-ratelimit-remaining-requests" in headers:
        return RateLimits(
            requests=_whole(headers.get("x-ratelimit-limit-requests")),
            requests_left=_whole(headers.get("x-ratelimit-remaining-requests")),
            requests_reset_seconds=_duration(headers.get("x-ratelimit-reset-requests")),
            tokens=_whole(headers.get("x-ratelimit-limit-tokens")),
            tokens_left=_whole(headers.get("x-ratelimit-remaining-tokens")),
            tokens_reset_seconds=_duration(headers.get("x-ratelimit-reset-tokens")),
        )
    if "anthropic-ratelimit-requests-limit" in headers or "anthropic-ratelimit-tokens-limit" in headers:
        return RateLimits(
            requests=_whole(headers.get("anthropic-ratelimit-requests-limit")),
            requests_left=_whole(headers.get("anthropic-ratelimit-requests-remaining")),
            requests_reset_seconds=_until(headers.get("anthropic-ratelimit-requests-reset")),
            tokens=_whole(headers.get("anthropic-ratelimit-tokens-limit")),
            tokens_left=_whole(headers.get("anthropic-ratelimit-tokens-remaining")),
            tokens_reset_seconds=_until(headers.get("anthropic-ratelimit-tokens-reset")),
        )
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
