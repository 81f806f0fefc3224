"""The rows on their way into the batch: handed in by any thread, waiting, given a place, preempted.

Knows rows, their order and the memory. Does not know the model, forwards or drafts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.requests.outputs import EngineStats
from local_backend.requests.sequence import Row, State, notify_safely
from local_backend.scheduling.lengths import Scheduling
from local_backend.scheduling.memory_budget import MemoryBudget
from local_backend.scheduling.running_batch import RunningBatch
from local_backend.scheduling.scheduler import Scheduler
from local_backend.scheduling.waiting_queue import AdmissionPolicy


class Inbox:
    """Who waits, and who of them joins the rows in use.

    :meth:`submit`, :meth:`cancel` and :meth:`reschedule` may be called by any thread; what they ask for is
    done when the engine's thread next calls :meth:`receive`.

    Args:
        scheduling: Who begins first, and within how much memory.
        running: The rows in use.
        cache: Told how long they are expected to become.
        memory: What a row may take.
        stats: Of the engine; counts what was taken over from other rows, and who was preempted.
    """

    def __init__(
        self,
        scheduling: Scheduling,
        *,
        running: RunningBatch,
        cache: RaggedKVCache,
        memory: MemoryBudget,
        stats: EngineStats,
    ) -> None:
        self.scheduling = scheduling
        self._scheduler = Scheduler(scheduling, memory.max_tokens)
        self._running, self._cache, self._memory, self._stats = running, cache, memory, stats
        self._inbox: deque[Row] = deque()
        self._lock = threading.Lock()
        self._new_scheduling: Scheduling | None = None
        self._is_any_cancelled = False

    def __len__(self) -> int:
        """Rows that have no place yet."""
        return len(self._scheduler) + len(self._inbox)

    # By any thread -------------------------------------------------------------------------------

    def submit(self, rows: Sequence[Row]) -> None:
        """Let rows wait; those submitted together are admitted together."""
        with self._lock:
            self._inbox.extend(rows)

    def cancel(self, rows: Sequence[Row]) -> bool:
        """Let rows go; returns whether any of them has not ended yet."""
        for row in rows:
            row.cancelled = True
        is_any_left = any(row.state is not State.FINISHED for row in rows)
        if is_any_left:
            self._is_any_cancelled = True
        return is_any_left

    def reschedule(self, scheduling: Scheduling | AdmissionPolicy) -> None:
        """Order rows otherwise, those that wait already included.

        Raises:
            ValueError: The policy is unknown, or another memory is asked for: that of an engine is fixed.
        """
        scheduling = Scheduling.of(scheduling)
        if scheduling.max_cache_bytes not in (None, self.scheduling.max_cache_bytes):
            raise ValueError(
                f"the engine was made with max_cache_bytes={self.scheduling.max_cache_bytes}, which stays, "
                f"but got {scheduling.max_cache_bytes}: make another engine"
            )
        self.scheduling = replace(scheduling, max_cache_bytes=self.scheduling.max_cache_bytes)
        self._new_scheduling = self.scheduling

    def clear(self) -> list[Row]:
        """Let no row wait; returns those that did."""
        with self._lock:
            rows = [*self._scheduler.clear(), *self._inbox]
            self._inbox.clear()
        return rows

    # By the engine's thread, in the order of a step ----------------------------------------------

    def receive(self) -> None:
        """Take in what was submitted, let go of what was cancelled."""
        if (scheduling := self._new_scheduling) is not None:
            self._new_scheduling = None
            self._scheduler.choose(scheduling)
        with self._lock:
            received = [*self._inbox]
            self._inbox.clear()
        self._scheduler.add(received)
        if self._is_any_cancelled:
            self._is_any_cancelled = False  # before looking: who cancels while this looks is seen next time
            for row in [row for row in self._scheduler if row.cancelled]:
                self._scheduler.remove(row)
                notify_safely(row, partial(row.finish, "cancelled"))
        for row in [row for row in self._running.rows if row.cancelled]:
            self._running.remove(row)
            notify_safely(row, partial(row.finish, "cancelled"))

    def admit(self) -> None:
        """Give waiting rows a place, in order; one that can soon share a beginning waits for it."""
        if self._running.is_full or not self._scheduler.is_time(len(self._running), self._running.num_free):
            return
        postponed: list[Row] = []
        try:
            while not self._running.is_full and len(postponed) < self._running.max_rows:
                row = self._scheduler.next_that_fits(self._running.rows)
                if row is None:
                    break
                self._cache.expected_length = self._scheduler.expected_length([*self._running.rows, row])
                try:
                    if self._running.add(row):
                        self._stats.num_reused_tokens += row.num_cached
                    else:
                        postponed.append(row)
                except Exception as error:  # it has no place yet: who fails those in use does not know it
                    notify_safely(row, partial(row.fail, error))
                    raise
        finally:
            for row in postponed:
                self._scheduler.put_back(row)

    def preempt(self) -> None:
        """Preempt rows that outgrew their reservation; they go on, in their turn, from what they have."""
        for row in self._scheduler.over_reservation(self._running.rows):
            try:
                self._memory.require(len(row.token_ids))
            except ValueError as error:
                self._running.remove(row)
                notify_safely(row, partial(row.fail, error))
            else:
                self._running.preempt(row)
                self._scheduler.put_back(row)
                row.stats.num_preempted += 1
                self._stats.num_preempted += 1
        self._cache.expected_length = self._scheduler.expected_length(self._running.rows)

    def note_draft(self, num_tokens: int) -> None:
        """Drafts come to so many tokens: rows that begin should find room for them, too."""
        self._scheduler.note_draft(num_tokens)

    def observe(self, row: Row) -> None:
        """Learn how long an answer has become that ended by itself."""
        self._scheduler.observe(row)


__all__ = ["Inbox"]
