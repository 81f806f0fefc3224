"""Running several pieces of work at once, reading what they bring in order, leaving none of them running.

Knows tasks and places, not models. How many model calls may be in flight is decided where they are made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Crew:
    """Tasks that may be started at any time and end together."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts ``work``, which is expected to tell of its own errors."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    def cancel(self) -> None:
        """Cancels what still runs, without waiting for it."""
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """Cancels what still runs and returns when all has ended."""
        await cancel_and_wait(self._tasks)


class Arrivals(Generic[T]):
    """What several tasks bring, in the order of arrival, for one reader.

    Unlike a queue it can forget: an attempt that failed may have brought text nobody has read yet.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Brings ``item``."""
        self._items.append(item)
        self._wake()

    def put_back(self, items: Iterable[T]) -> None:
        """Puts ``items`` before all others, in their order."""
        self._items.extendleft(reversed(list(items)))
        self._wake()

    def forget(self, unwanted: Callable[[T], bool]) -> None:
        """Drops items nobody has read."""
        self._items = deque(item for item in self._items if not unwanted(item))

    async def get(self) -> T:
        """The next item, once there is one."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._items.popleft()

    def _wake(self) -> None:
        if self._reader and not self._reader.done():
            self._reader.set_result(None)


class ReadingOrder(Generic[T]):
    """Puts arrivals in reading order: all of position 0, then all of position 1, ...

    The first position that has not ended passes through as it arrives; later ones are kept until their turn.
    ``None`` ends a position.
    """

    def __init__(self, num_positions: int = 0) -> None:
        self._waiting: list[deque[T | None]] = [deque() for _ in range(num_positions)]
        self._current = 0

    def arrive(self, position: int, item: T | None) -> Iterator[tuple[int, T | None]]:
        """Takes one arrival and yields what can be read now."""
        while position >= len(self._waiting):
            self._waiting.append(deque())
        self._waiting[position].append(item)
        while self._current < len(self._waiting) and (waiting := self._waiting[self._current]):
            item = waiting.popleft()
            yield self._current, item
            self._current += item is None

    def is_read(self, position: int) -> bool:
        """Whether anything that arrives at ``position`` has been or would be read at once."""
        return position <= self._current

    def forget(self, position: int) -> None:
        """Drops what is kept of ``position``."""
        if position < len(self._waiting):
            self._waiting[position].clear()


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Like ``asyncio.gather``, except that after an error or a cancellation nothing is left running."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels the ``tasks`` that still run and returns when all have ended, whatever they ended with."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.gather(*running, return_exceptions=True)
