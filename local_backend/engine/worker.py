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

    def start_over(self) -> None:
        """Drop all work, in a child made by ``os.fork``: it is the parent's."""


class Worker:
    """Calls ``step`` on its own daemon thread from :meth:`wake` until it returns false.

    No step runs while the process forks. A child, which has no thread but the one that forked, starts over.

    Args:
        steps: The object to drive; held by a weak reference.
        name: The thread's name.
    """

    def __init__(self, steps: Steps, *, name: str) -> None:
        self._steps = weakref.ref(steps)
        self._name = name
        self._closing = False
        self._begin()
        _workers.add(weakref.ref(self, _workers.discard))

    def _begin(self) -> None:
        self._condition = threading.Condition()
        self._has_work = self._is_stepping = False
        self._num_holds = 0
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Start the thread, or wake it up; call when there is work."""
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
            while self._begin_step():
                is_more = False
                try:
                    is_more = steps.step()
                finally:
                    self._end_step(is_more)
            del steps

    def _wait_for_work(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._has_work or self._closing)
            return not self._closing

    def _begin_step(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: not self._num_holds)
            self._is_stepping = self._has_work and not self._closing
            self._has_work = False
            return self._is_stepping

    def _end_step(self, is_more: bool) -> None:
        with self._condition:
            self._is_stepping = False
            self._has_work |= is_more
            self._condition.notify_all()

    # When the process forks ------------------------------------------------------------------------

    def hold(self) -> None:
        """Wait for the end of a step; no other begins before :meth:`release`."""
        with self._condition:
            self._num_holds += 1
            if self._thread is not threading.current_thread():
                self._condition.wait_for(lambda: not self._is_stepping)

    def release(self) -> None:
        """Let steps begin again."""
        with self._condition:
            self._num_holds -= 1
            self._condition.notify_all()

    def start_over(self) -> None:
        """Begin without work and thread, in a child."""
        self._begin()
        if (steps := self._steps()) is not None:
            steps.start_over()


_workers: set[weakref.ref[Worker]] = set()


class _Forking(threading.local):
    """The workers that a thread holds while it forks."""

    workers: Sequence[Worker] = ()


_forking = _Forking()


def _living() -> list[Worker]:
    return [worker for known in tuple(_workers) if (worker := known()) is not None]


def _hold_all() -> None:
    _forking.workers = _living()
    for worker in _forking.workers:
        worker.hold()


def _release_all() -> None:
    for worker in _forking.workers:
        worker.release()
    _forking.workers = ()


def _start_over_all() -> None:
    for worker in _living():
        worker.start_over()
    _forking.workers = ()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_start_over_all)


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
    Has no lock, which a child made by ``os.fork`` might find taken.
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
