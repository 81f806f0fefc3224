"""The rows waiting for the batch: submitted from any thread, queued, admitted, preempted.

Knows rows, their order and the memory budget. Does not know the model, forwards or drafts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.scheduling.lengths import Scheduling
from local_backend.scheduling.memory_budget import MemoryBudget
from local_backend.scheduling.running_batch import RunningBatch
from local_backend.scheduling.scheduler import Scheduler
from local_backend.scheduling.waiting_queue import AdmissionPolicy
from local_backend.sequences.outputs import EngineStats
from local_backend.sequences.sequence import Row, State, notify_safely


class Inbox:
    """The queue of submitted rows, and their admission to the running batch.

    :meth:`submit`, :meth:`cancel` and :meth:`reschedule` may be called from any thread; they take effect when
    the engine's thread next calls :meth:`receive`.

    Args:
        scheduling: Order of admission and memory limit.
        running: The running rows.
        cache: Their KV cache; told how long they are expected to become.
        memory: The memory budget of rows.
        stats: The engine's; counts reused tokens and preemptions.
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
        """Rows without a slot."""
        return len(self._scheduler) + len(self._inbox)

    # From any thread -----------------------------------------------------------------------------

    def submit(self, rows: Sequence[Row]) -> None:
        """Queue rows; those submitted together are admitted together."""
        with self._lock:
            self._inbox.extend(rows)

    def cancel(self, rows: Sequence[Row]) -> bool:
        """Cancel rows; returns whether any of them is unfinished."""
        for row in rows:
            row.cancelled = True
        is_any_left = any(row.state is not State.FINISHED for row in rows)
        if is_any_left:
            self._is_any_cancelled = True
        return is_any_left

    def reschedule(self, scheduling: Scheduling | AdmissionPolicy) -> None:
        """Change the order of admission, also for rows that already wait.

        Raises:
            ValueError: The policy is unknown, or ``max_cache_bytes`` is given and differs from the engine's.
        """
        scheduling = Scheduling.of(scheduling)
        if scheduling.max_cache_bytes not in (None, self.scheduling.max_cache_bytes):
            raise ValueError(
                f"the engine was made with max_cache_bytes={self.scheduling.max_cache_bytes}, which cannot "
                f"change, but got {scheduling.max_cache_bytes}: make another engine"
            )
        self.scheduling = replace(scheduling, max_cache_bytes=self.scheduling.max_cache_bytes)
        self._new_scheduling = self.scheduling

    def clear(self) -> list[Row]:
        """Empty the queue; returns the rows that waited."""
        with self._lock:
            rows = [*self._scheduler.clear(), *self._inbox]
            self._inbox.clear()
        return rows

    # From the engine's thread, in the order of a step --------------------------------------------

    def receive(self) -> None:
        """Take in submitted rows and drop cancelled ones."""
        if (scheduling := self._new_scheduling) is not None:
            self._new_scheduling = None
            self._scheduler.choose(scheduling)
        with self._lock:
            received = [*self._inbox]
            self._inbox.clear()
        self._scheduler.add(received)
        if self._is_any_cancelled:
            self._is_any_cancelled = False  # reset first: a cancel during the loop is handled next time
            for row in [row for row in self._scheduler if row.cancelled]:
                self._scheduler.remove(row)
                notify_safely(row, partial(row.finish, "cancelled"))
        for row in [row for row in self._running.rows if row.cancelled]:
            self._running.remove(row)
            notify_safely(row, partial(row.finish, "cancelled"))

    def admit(self) -> None:
        """Admit waiting rows in order; postpone a row that can soon share a prefix."""
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
                except Exception as error:  # it has no slot yet, so failing the running rows would miss it
                    notify_safely(row, partial(row.fail, error))
                    raise
        finally:
            for row in postponed:
                self._scheduler.put_back(row)

    def preempt(self) -> None:
        """Preempt rows over their reservation, to resume later; fail those that can never fit."""
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
        """Report the size of the longest draft, so that admission reserves memory for drafts too."""
        self._scheduler.note_draft(num_tokens)

    def observe(self, row: Row) -> None:
        """Report the length of an answer that ended at an end token or stop sequence."""
        self._scheduler.observe(row)
