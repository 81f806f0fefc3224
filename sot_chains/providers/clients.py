"""One client of a vendor's SDK per event loop and settings: a client is bound to the loop it first ran on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

_Clients = dict[Hashable, Any]
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[_Clients, AsyncGenerator[None, None]]] = (
    WeakKeyDictionary()
)


async def find_client(settings: Hashable, make: Callable[[], Any]) -> Any:
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
    """Closes the clients of a loop, which finalises its async generators before it closes."""
    try:
        yield
    finally:
        while clients:
            _, client = clients.popitem()
            await client.close()
