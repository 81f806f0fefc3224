"""Running tasks that end together: after an error or a cancellation nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Tasks that may be started at any time, also by one of them; the first error ends them all.

    ``asyncio.TaskGroup`` would cancel the task that waits, too, and before Python 3.13 leave it marked as
    cancelled, which breaks a deadline or a cancellation that comes later.
    """

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self._num_running = 0
        self._error: BaseException | None = None
        self._ended: asyncio.Future[None] | None = None
        self._context = copy_context()  # of the callbacks: one instead of a copy for each

    def start(self, work: Coroutine[Any, Any, None], *, is_needed: bool = True) -> None:
        """Starts ``work``, which is cancelled, unless it is needed, once all else has ended."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        self._num_running += is_needed
        task.add_done_callback(partial(self._note_end, is_needed), context=self._context)

    async def join(self) -> None:
        """Waits until all have ended, be it because the first error or a cancellation has ended them.

        Raises:
            BaseException: The first error of a task.
        """
        try:
            if self._num_running and self._error is None:
                self._ended = asyncio.get_running_loop().create_future()
                await self._ended
        finally:
            if not all(map(asyncio.Task.done, self._tasks)):
                await cancel_and_wait(self._tasks)
        if self._error is not None:
            raise self._error

    def _note_end(self, was_needed: bool, task: asyncio.Task[None]) -> None:
        self._num_running -= was_needed
        if not task.cancelled():
            error = task.exception()  # asked for, it counts as seen
            self._error = self._error or error
        has_ended = self._error is not None or self._num_running == 0
        if has_ended and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Like ``asyncio.gather``, except that after an error or a cancellation nothing is left running."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels the ``tasks`` that still run and returns when all have ended, whatever they ended with."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)  # their errors count as seen
