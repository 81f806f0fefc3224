"""API clients by event loop.

An asynchronous client belongs to the loop it first ran on; used on another it fails, and left open when its
loop closes it warns of sockets nobody closed. So each loop has clients of its own, which are closed with it.
Providers with the same settings share one, and with it the connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary


class Closable(Protocol):
    """What the clients of vendors have in common."""

    async def close(self) -> None:
        """Closes the client's connections."""
        ...


ClientT = TypeVar("ClientT", bound=Closable)


class ClientsByLoop(Generic[ClientT]):
    """The clients of one vendor."""

    def __init__(self) -> None:
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Clients[ClientT]] = WeakKeyDictionary()
        _vendors.append(self)

    async def get(self, settings: Hashable, make: Callable[[], ClientT]) -> ClientT:
        """The running loop's client with ``settings``; if there is none yet, the one ``make`` makes."""
        loop = asyncio.get_running_loop()
        if (clients := self._loops.get(loop)) is None:
            for closed in [other for other in list(self._loops) if other.is_closed()]:
                del self._loops[closed]  # its connections refer to it, so it would never be garbage
            clients = self._loops[loop] = _Clients()
            await anext(clients.lifetime)
        return clients.get(settings, make)

    async def close(self) -> None:
        """Closes the clients of the running loop; the next request makes new ones."""
        if clients := self._loops.pop(asyncio.get_running_loop(), None):
            await clients.lifetime.aclose()


_vendors: list[ClientsByLoop[Any]] = []


async def close_clients() -> None:
    """Closes every connection that named models have open on the running event loop.

    Not needed where a loop ends with ``asyncio.run``, which does it; of use in a long-lived one that is done
    with closed models for now. Calls that are going on fail.
    """
    for clients in _vendors:
        await clients.close()


class _Clients(Generic[ClientT]):
    """The clients of one loop.

    Their lifetime is an asynchronous generator, since those a loop finishes before it closes
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
