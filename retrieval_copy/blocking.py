"""Asynchronous work for callers that block: an event loop in a thread, as long as the process lives.

API clients belong to the loop they first ran on, so a loop for each call would cost a connection each time.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing
from queue import SimpleQueue
from typing import TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

T = TypeVar("T")

_lock = threading.Lock()
_portals: dict[int, BlockingPortal] = {}  # by process: a forked child inherits the portal, but no thread


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Awaits ``work()`` in the caller's context; an interrupt cancels it."""
    future = _portal().start_task_soon(work)
    try:
        return future.result()
    finally:
        future.cancel()


def iterate(work: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
    """Yields the items of ``work()``; closing the iterator cancels it."""
    items: SimpleQueue[tuple[T] | None] = SimpleQueue()

    async def pump() -> None:
        try:
            async with aclosing(work()) as stream:
                async for item in stream:
                    items.put((item,))
        finally:
            items.put(None)

    future = _portal().start_task_soon(pump)
    try:
        while (item := items.get()) is not None:
            yield item[0]
        future.result()
    finally:
        future.cancel()


def _portal() -> BlockingPortal:
    pid = os.getpid()
    with _lock:
        if pid not in _portals:
            running = start_blocking_portal("asyncio", name="retrieval_copy")
            _portals[pid] = running.__enter__()
            atexit.register(_end, pid, running)
        return _portals[pid]


def _end(pid: int, running: AbstractContextManager[BlockingPortal]) -> None:
    if pid == os.getpid():
        running.__exit__(None, None, None)
