"""News of a row, carried from the engine's thread to whoever waits for it.

A mailbox gathers: however fast the engine writes, a slow reader is woken once and finds all
that has come in the meantime. Knows updates and threads. Does not know the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from local_backend.sequence import Update


def _merge(updates: deque[Update]) -> Update:
    text = "".join(update.text for update in updates)
    token_ids = tuple(token for update in updates for token in update.token_ids)
    last = updates[-1]
    updates.clear()
    return Update(text, token_ids, last.completion, last.error)


class ThreadMailbox:
    """For a reader that blocks its thread."""

    def __init__(self) -> None:
        self._updates: deque[Update] = deque()
        self._arrived = threading.Condition()

    def put(self, update: Update) -> None:
        """Leave an update; called from the engine's thread."""
        with self._arrived:
            self._updates.append(update)
            self._arrived.notify()

    def get(self) -> Update:
        """Everything that has arrived, as one update; waits until there is something."""
        with self._arrived:
            while not self._updates:
                self._arrived.wait()
            return _merge(self._updates)


class LoopMailbox:
    """For a reader in the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._updates: deque[Update] = deque()
        self._lock = threading.Lock()
        self._arrived = asyncio.Event()

    def put(self, update: Update) -> None:
        """Leave an update; called from the engine's thread.

        Raises:
            RuntimeError: The reader's event loop is closed.
        """
        with self._lock:
            wake = not self._updates
            self._updates.append(update)
        if wake:
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def get(self) -> Update:
        """Everything that has arrived, as one update; waits until there is something."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                if self._updates:
                    return _merge(self._updates)
