"""One long-lived event loop in a thread of its own, for calls made from synchronous code.

Running each synchronous call on a loop of its own would break whatever a model keeps between calls (its
connections belong to a loop), and is impossible where a loop already runs, as in Jupyter.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import aclosing
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs ``work()`` on the background loop, in the caller's context, and returns its result.

    When waiting is interrupted (``KeyboardInterrupt``), the work is cancelled before the interrupt
    goes on.

    Raises:
        RuntimeError: The caller is itself on the background loop, which would wait for itself.
    """
    job = _Job(work)
    try:
        return job.future.result()
    finally:
        job.cancel_and_wait()


def iterate(work: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
    """Runs ``work()`` on the background loop and yields its items; closing the iterator cancels it.

    Raises:
        RuntimeError: The caller is itself on the background loop.
    """
    items: SimpleQueue[tuple[T] | None] = SimpleQueue()

    async def pump() -> None:
        async with aclosing(work()) as stream:
            async for item in stream:
                items.put((item,))

    job = _Job(pump)
    job.future.add_done_callback(lambda _: items.put(None))
    try:
        while (item := items.get()) is not None:
            yield item[0]
        job.future.result()
    finally:
        job.cancel_and_wait()


class _Job(Generic[T]):
    """A coroutine on the background loop, seen from another thread."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._loop = _background_loop()
        if _on(self._loop):
            raise RuntimeError(
                "a synchronous call was made from a coroutine on the loop that serves synchronous calls; "
                "use the awaitable method there: ainvoke, astream or abatch"
            )
        self.future: Future[T] = Future()
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._loop.call_soon_threadsafe(self._start)  # carries the caller's context variables along

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work())
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.future.set_exception(asyncio.CancelledError())
        elif error := task.exception():
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())

    def cancel_and_wait(self) -> None:
        if not self.future.done():
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
            self.future.exception()


def _on(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


_lock = threading.Lock()
_loops: dict[
    int, asyncio.AbstractEventLoop
] = {}  # by process: a forked child inherits the loop, but no thread


def _background_loop() -> asyncio.AbstractEventLoop:
    pid = os.getpid()
    with _lock:
        if pid not in _loops:
            ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
            thread = threading.Thread(
                target=lambda: asyncio.run(_serve(ready)), name="sot_chains", daemon=True
            )
            thread.start()
            _loops[pid], stop = ready.result()
            atexit.register(_end, thread, _loops[pid], stop, pid)
        return _loops[pid]


async def _serve(ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    stop = asyncio.Event()
    ready.set_result((asyncio.get_running_loop(), stop))
    await stop.wait()  # then asyncio.run cancels what still runs and closes the clients of this loop


def _end(thread: threading.Thread, loop: asyncio.AbstractEventLoop, stop: asyncio.Event, pid: int) -> None:
    if pid == os.getpid():
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=2)
