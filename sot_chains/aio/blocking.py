"""Tasks that end together, and async code for synchronous callers.

API clients are bound to the loop they first ran on, so a new loop per call would break them; and no loop can
be started where one already runs, as in Jupyter. So synchronous calls run on one background event loop that
lives as long as the process. Knows ``anyio``'s portal and Runnables, not models.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from anyio.from_thread import BlockingPortal, start_blocking_portal
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.utils import Input, Output

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


_MAX_WAIT_SECONDS = 60.0  # for cancelled work to end
_lock = threading.Lock()
_portals: dict[int, tuple[BlockingPortal, int]] = {}  # by process: a forked child inherits no thread


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Awaits ``work()`` on the background loop, in the caller's context.

    If the wait is interrupted (``KeyboardInterrupt``), the work is cancelled before the interrupt propagates.

    Raises:
        RuntimeError: The caller runs on the background loop itself, which would deadlock.
    """

    async def only() -> AsyncGenerator[T, None]:
        yield await work()

    (result,) = iterate(only)
    return result


def iterate(work: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
    """Yields the items of ``work()``, which runs on the background loop; closing the iterator cancels it.

    Raises:
        RuntimeError: The caller runs on the background loop itself.
    """
    portal, thread_id = _portal()
    if threading.get_ident() == thread_id:
        raise RuntimeError(
            "a synchronous call was made from a coroutine on the loop that serves synchronous calls; "
            "use the awaitable method there: ainvoke, astream or abatch"
        )
    items: SimpleQueue[tuple[T] | None] = SimpleQueue()

    async def pump() -> None:
        try:
            async with aclosing(work()) as stream:
                async for item in stream:
                    items.put((item,))
        finally:
            items.put(None)

    running = portal.start_task_soon(pump)
    try:
        while (item := items.get()) is not None:
            yield item[0]
        running.result()
    finally:
        if running.cancel():  # the wait was interrupted, or the iterator closed
            with suppress(Empty):
                while items.get(timeout=_MAX_WAIT_SECONDS) is not None:
                    pass


class BlockingRunnable(Runnable[Input, Output]):
    """A Runnable whose synchronous calls run its awaitable ones on the background loop.

    They therefore work inside a running event loop, too, such as Jupyter's.
    """

    def invoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Output:
        """Returns the output for ``input``; see :meth:`ainvoke`."""
        return run(lambda: self.ainvoke(input, config, **kwargs))

    def stream(
        self, input: Input, config: RunnableConfig | None = None, **kwargs: Any | None
    ) -> Iterator[Output]:
        """Streams the output for ``input``; see :meth:`astream`."""
        return iterate(lambda: cast("AsyncGenerator[Output, None]", self.astream(input, config, **kwargs)))

    def batch(
        self,
        inputs: list[Input],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[Output]:
        """Returns the outputs for all ``inputs``; see :meth:`abatch`."""
        return run(lambda: self.abatch(inputs, config, return_exceptions=return_exceptions, **kwargs))


def _portal() -> tuple[BlockingPortal, int]:
    pid = os.getpid()
    with _lock:
        if pid not in _portals:
            running = start_blocking_portal("asyncio", name="sot_chains")
            portal = running.__enter__()
            _portals[pid] = portal, portal.call(threading.get_ident)
            atexit.register(_end, pid, running)
        return _portals[pid]


def _end(pid: int, running: AbstractContextManager[BlockingPortal]) -> None:
    if pid == os.getpid():
        running.__exit__(None, None, None)
