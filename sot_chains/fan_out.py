"""Running several streams at once, and leaving none of them running.

Knows tasks and queues, not models: what is streamed may be anything but ``None``. How many model calls
may be in flight is decided where they are made, by a semaphore they share.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class _Failure:
    error: BaseException


async def fan_out(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T | None], None]:
    """Runs all ``streams`` at once and yields ``(position, item)`` as items arrive.

    ``(position, None)`` says that the stream at ``position`` has ended. When a stream fails, its error is
    raised. However this generator ends, including by being closed or cancelled, the streams that still
    run have been cancelled and awaited by then: use it under ``contextlib.aclosing``.
    """
    arrivals: asyncio.Queue[tuple[int, T | _Failure | None]] = asyncio.Queue()

    async def pump(position: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    arrivals.put_nowait((position, item))
        except BaseException as error:
            arrivals.put_nowait((position, _Failure(error)))
            raise
        arrivals.put_nowait((position, None))

    tasks = [asyncio.create_task(pump(position, stream)) for position, stream in enumerate(streams)]
    try:
        num_running = len(tasks)
        while num_running:
            position, item = await arrivals.get()
            if isinstance(item, _Failure):
                raise item.error
            num_running -= item is None
            yield position, item
    finally:
        await cancel_and_wait(tasks)


class ReadingOrder(Generic[T]):
    """Puts what :func:`fan_out` yields in reading order: all of position 0, then all of position 1, ...

    The first stream that has not ended passes through as it arrives; later ones are kept until their turn.
    """

    def __init__(self, num_streams: int) -> None:
        self._waiting: list[deque[T | None]] = [deque() for _ in range(num_streams)]
        self._current = 0

    def arrive(self, position: int, item: T | None) -> Iterator[tuple[int, T | None]]:
        """Takes one arrival and yields what can be read now."""
        self._waiting[position].append(item)
        while self._current < len(self._waiting) and (waiting := self._waiting[self._current]):
            item = waiting.popleft()
            yield self._current, item
            self._current += item is None


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Like ``asyncio.gather``, except that after an error or a cancellation nothing is left running."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)


async def cancel_and_wait(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the ``tasks`` that still run and returns when all have ended, whatever they ended with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
