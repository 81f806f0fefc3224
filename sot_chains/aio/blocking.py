"""Runs async code for synchronous callers, on one background event loop that lives as long as the process.

API clients are bound to the loop they first ran on, so a new loop per call would break them; and no loop can
be started where one already runs, as in Jupyter. Knows ``anyio``'s portal and Runnables, not models.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from anyio.from_thread import BlockingPortal, start_blocking_portal
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.utils import Input, Output

T = TypeVar("T")

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
