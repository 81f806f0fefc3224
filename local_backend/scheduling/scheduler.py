"""The scheduler: which submitted rows run, in which order they are admitted, and which are preempted.

Memory is reserved by predicted length and grows with the rows. Knows rows, predictions and how many tokens
fit. Does not know the model, forwards or drafts.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.scheduling.admission import AdmissionQueue, Ticket
from local_backend.scheduling.lengths import (
    AdmissionPolicy,
    LearningPredictor,
    LengthPredictor,
    ObservedLengths,
    Prediction,
    Scheduling,
)
from local_backend.scheduling.memory import MemoryBudget
from local_backend.scheduling.running_batch import RunningBatch
from local_backend.sequences.outputs import EngineStats
from local_backend.sequences.sequence import Row, State, notify_safely

# Tokens reserved for an answer without a prediction, and the least by which a reservation grows.
_FIRST_TOKENS, _LEAST_GROWTH_TOKENS = 64, 32
_GROWTH = 0.5
# From this many observed answers on, the lengths of waiting rows are predicted again.
_FIRST_LESSON_ANSWERS = 8
# Drafts reserve at most this share of a row's length: another row gains more than longer drafts.
_DRAFT_SHARE = 0.25

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class Scheduler:
    """The waiting rows, and the memory reserved for the running ones.

    :meth:`submit`, :meth:`cancel`, :meth:`reschedule` and :meth:`clear` may be called from any thread; they
    take effect when the engine's thread next calls :meth:`receive`.
    """

    def __init__(
        self,
        scheduling: Scheduling,
        running: RunningBatch,
        cache: RaggedKVCache,
        memory: MemoryBudget,
        stats: EngineStats,
    ) -> None:
        self.scheduling = scheduling
        self._running, self._cache, self._memory, self._stats = running, cache, memory, stats
        self._max_tokens = memory.max_tokens
        self._lock = threading.Lock()
        self._submitted: list[Row] = []
        self._is_any_cancelled = False
        self._queue: AdmissionQueue[Row] = AdmissionQueue()
        self._tickets: WeakKeyDictionary[Row, Ticket] = WeakKeyDictionary()  # of running rows
        self._reserved: WeakKeyDictionary[Row, int] = WeakKeyDictionary()  # tokens, prompts included
        self._num_draft_tokens = self._num_observed = 0
        self._follow(scheduling)

    def __len__(self) -> int:
        """Rows without a slot."""
        return len(self._queue) + len(self._submitted)

    # From any thread -----------------------------------------------------------------------------

    def submit(self, rows: Sequence[Row]) -> None:
        """Queue rows; those submitted together are admitted together."""
        with self._lock:
            self._submitted.extend(rows)

    def cancel(self, rows: Sequence[Row]) -> bool:
        """Cancel rows; returns whether any of them is unfinished."""
        for row in rows:
            row.cancelled = True
        is_any_left = any(row.state is not State.FINISHED for row in rows)
        self._is_any_cancelled |= is_any_left
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
        kept = {name: getattr(self.scheduling, name) for name in ("max_cache_bytes", "gpu_memory_share")}
        self.scheduling = replace(scheduling, **kept)

    def clear(self) -> list[Row]:
        """Empty the queue; returns the rows that waited."""
        with self._lock:
            rows = [*(self._queue.remove(ticket) for _, ticket in self._queue), *self._submitted]
            self._submitted.clear()
        return rows

    # From the engine's thread, in the order of a step --------------------------------------------

    def receive(self) -> None:
        """Take in submitted rows and drop cancelled ones."""
        if self.scheduling is not self._followed:
            self._follow(self.scheduling)
        with self._lock:
            submitted, self._submitted = self._submitted, []
        if submitted:
            self._queue.add(zip(submitted, self._predict(submitted), strict=True))
        if self._is_any_cancelled:
            self._is_any_cancelled = False  # reset first: a cancel during the loop is handled next time
            for row, ticket in self._queue:
                if row.cancelled:
                    self._queue.remove(ticket)
                    notify_safely(row, partial(row.finish, "cancelled"))
        for row in self._running.rows:
            if row.cancelled:
                self._running.remove(row, keep=True)
                notify_safely(row, partial(row.finish, "cancelled"))

    def admit(self) -> None:
        """Admit waiting rows in order; postpone a row that can soon share a prefix."""
        num_free = self._running.num_free
        if not num_free or not self._queue.is_time(num_running=len(self._running), num_free=num_free):
            return
        postponed: list[Row] = []
        try:
            while self._queue and self._running.num_free and len(postponed) < self._running.max_rows:
                row, self._tickets[row] = self._queue.pop()
                if not self._reserve(row):
                    # Those behind it wait too, so that smaller rows cannot starve it.
                    self._queue.put_back(row, self._tickets[row])
                    break
                try:
                    if not self._running.add(row):
                        postponed.append(row)
                except Exception as error:  # it has no slot yet, so failing the running rows would miss it
                    notify_safely(row, partial(row.fail, error))
                    raise
        finally:
            for row in postponed:
                self._queue.put_back(row, self._tickets[row])

    def preempt(self) -> None:
        """Grow the reservations of rows; preempt those without memory, and fail those that can never fit."""
        if self._max_tokens is not None:
            for row in self._running.rows:
                if len(row.token_ids) > self._reserved[row]:
                    self._grow(row, self._max_tokens // len(self._running))
        self._cache.expected_length = self._expected_length(self._running.rows)

    def note_draft(self, num_tokens: int) -> None:
        """Note the size of the longest draft, so that admission reserves memory for drafts too."""
        self._num_draft_tokens = max(self._num_draft_tokens, num_tokens)

    def observe(self, row: Row) -> None:
        """Report the length of an answer that ended at an end token or stop string."""
        num_tokens = row.stats.num_tokens
        predictor = self._predictor
        if (self._uses_predictions or self._followed.predictor) and isinstance(predictor, LearningPredictor):
            self._guarded(lambda: predictor.observe(row.prompt_token_ids, num_tokens))
            self._num_observed += 1
            # After 8, 16, 32, ... answers: later ones change less.
            is_power_of_two = not self._num_observed & (self._num_observed - 1)
            if is_power_of_two and self._num_observed >= _FIRST_LESSON_ANSWERS:
                self._predict_again()

    # Memory --------------------------------------------------------------------------------------

    def _reserve(self, row: Row) -> bool:
        """Reserve memory for a waiting row; returns whether it fits beside the running ones."""
        prediction = self._tickets[row].prediction
        num_tokens = _FIRST_TOKENS if prediction is None else prediction.max_num_tokens
        length = max(row.num_prompt_tokens + math.ceil(num_tokens), len(row.token_ids) + 1)
        self._reserved[row] = self._within_memory(row, length)
        rows = [*self._running.rows, row]
        columns = self._expected_length(rows)
        is_room = self._max_tokens is None or len(rows) * columns <= self._max_tokens
        if is_room:
            self._cache.expected_length = columns
        return is_room

    def _grow(self, row: Row, available: int) -> None:
        """Grow a row's reservation to at most ``available`` tokens, or preempt the row."""
        num_tokens = len(row.token_ids)
        num_more = max(_LEAST_GROWTH_TOKENS, math.ceil(_GROWTH * (num_tokens - row.num_prompt_tokens)))
        wanted = self._within_memory(row, num_tokens + num_more)
        self._reserved[row] = min(wanted, available)
        if num_tokens <= available:
            return
        try:
            self._memory.require(num_tokens)
        except ValueError as error:
            self._running.remove(row)
            notify_safely(row, partial(row.fail, error))
            return
        self._running.preempt(row)
        expected = float(wanted - row.num_prompt_tokens)
        self._tickets[row].prediction = Prediction(expected, expected)
        self._queue.put_back(row, self._tickets[row])
        row.stats.num_preempted += 1
        self._stats.num_preempted += 1

    def _expected_length(self, running: Sequence[Row]) -> int:
        """Columns that running rows are expected to need, drafts included."""
        longest = max((self._reserved[row] for row in running), default=0)
        longest += min(self._num_draft_tokens, math.ceil(_DRAFT_SHARE * longest))
        return longest if self._max_tokens is None else min(longest, self._max_tokens)

    def _within_memory(self, row: Row, length: int) -> int:
        return min(length, row.max_length, self._max_tokens or row.max_length)

    # Predictions ---------------------------------------------------------------------------------

    def _follow(self, scheduling: Scheduling) -> None:
        """Switch to another policy and predictor."""
        self._followed = scheduling
        self._predictor: LengthPredictor | None = scheduling.predictor or ObservedLengths()
        self._num_observed = 0
        self._uses_predictions = self._max_tokens is not None or scheduling.policy != "first_come"
        self._queue.policy, self._queue.max_overtakes = scheduling.policy, scheduling.max_overtakes
        self._queue.sort()

    def _predict(self, rows: Sequence[Row]) -> Sequence[Prediction | None]:
        """The lengths of the answers, if anything depends on them."""
        predictions: list[Prediction | None] | None = None
        if rows and self._uses_predictions and self._predictor is not None:
            prompts, params = [row.prompt_token_ids for row in rows], [row.params for row in rows]
            predictions = self._guarded(partial(self._predictor.predict, prompts, params))
        return [
            prediction and prediction.within(row.room)
            for row, prediction in zip(rows, predictions or [None] * len(rows), strict=True)
        ]

    def _predict_again(self) -> None:
        waiting = [(row, ticket) for row, ticket in self._queue if not row.stats.num_preempted]
        predictions = self._predict([row for row, _ in waiting])
        for (_, ticket), prediction in zip(waiting, predictions, strict=True):
            ticket.prediction = prediction
        self._queue.sort()

    def _guarded(self, ask: Callable[[], _T]) -> _T | None:
        """Call the predictor; if it raises, drop it and schedule without predictions."""
        try:
            return ask()
        except Exception as error:
            _logger.warning(
                "%s failed with %s: %s; rows are scheduled without predictions from now on",
                type(self._predictor).__name__,
                type(error).__name__,
                error,
            )
            self._predictor = None
            return None
