"""The thread that drives an engine while there is work, and sleeps while there is none.

It references the engine only while working, so an unreferenced engine is collected and its thread ends.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from local_backend.sequences.outputs import Completion, Update


class Steps(Protocol):
    """What a worker drives."""

    def step(self) -> bool:
        """Run one step; returns whether there is more work."""


class Worker:
    """Calls ``step`` on its own daemon thread from :meth:`wake` until it returns false.

    Holds ``steps`` by a weak reference; ``name`` is the thread's.
    """

    def __init__(self, steps: Steps, *, name: str) -> None:
        self._steps = weakref.ref(steps)
        self._name = name
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._has_work = self._closing = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Start the thread, or wake it up; call when there is work.

        Raises:
            RuntimeError: The worker is closed, or was made before the process forked.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "this engine was made before the process forked, and its thread is the parent's: "
                "start workers first, then load the model in each"
            )
        with self._condition:
            if self._closing:
                raise RuntimeError("the engine is closed; make a new one")
            self._has_work = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def wake_if_open(self) -> None:
        """:meth:`wake`, unless :meth:`close` was called."""
        if not self._closing:
            self.wake()

    def close(self, timeout_seconds: float = 10.0) -> None:
        """End the thread after the current step, and wait for it."""
        if os.getpid() != self._process:
            return
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while self._wait_for_work():
            steps = self._steps()
            if steps is None:
                return
            while not self._closing and steps.step():
                pass
            del steps

    def _wait_for_work(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._has_work or self._closing)
            self._has_work = False
            return not self._closing


def _merge(updates: Sequence[Update]) -> Update:
    """One update that says what all of them say; raises the error that ended the row, if one did."""
    last = updates[-1]
    if last.error is not None:
        raise last.error
    text = "".join(update.text for update in updates)
    token_ids = tuple(token for update in updates for token in update.token_ids)
    return Update(text, token_ids, last.completion)


class ThreadMailbox:
    """Delivers the updates of one row to a reader that blocks its thread."""

    def __init__(self) -> None:
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()

    def put(self, update: Update) -> None:
        """Add an update; called from the engine's thread."""
        self._updates.put(update)

    def get(self) -> Update:
        """All updates received so far, merged into one; waits for at least one.

        Raises:
            Exception: The error that ended the row.
        """
        updates = [self._updates.get()]
        while not self._updates.empty():
            updates.append(self._updates.get())
        return _merge(updates)

    def completion(self) -> Completion:
        """The finished row; waits for it.

        Raises:
            Exception: The error that ended the row.
        """
        while (completion := self.get().completion) is None:
            pass
        return completion


class LoopMailbox:
    """Delivers the updates of one row to a reader in the running event loop.

    Wakes the loop for the first unread update only: a loop that cannot keep up is not woken for each of them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._updates: deque[Update] = deque()
        self._arrived = asyncio.Event()

    def put(self, update: Update) -> None:
        """Add an update; called from the engine's thread.

        Raises:
            RuntimeError: The reader's event loop is closed.
        """
        self._updates.append(update)
        if len(self._updates) == 1:
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def get(self) -> Update:
        """:meth:`ThreadMailbox.get` without blocking the thread."""
        while not self._updates:  # the loop may have been woken for one that was read with an earlier one
            await self._arrived.wait()
            self._arrived.clear()
        updates = [self._updates.popleft()]
        while self._updates:
            updates.append(self._updates.popleft())
        return _merge(updates)
