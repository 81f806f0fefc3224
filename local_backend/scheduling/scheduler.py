"""Admission and preemption: length predictions, and memory reservations that grow with the rows.

Knows rows, predictions and how many tokens fit. Does not know the model, the cache or drafts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from local_backend.scheduling.lengths import (
    LearningPredictor,
    LengthPredictor,
    ObservedLengths,
    Prediction,
    Scheduling,
    admission_tokens,
)
from local_backend.scheduling.refill_delay import RefillDelay
from local_backend.scheduling.waiting_queue import ArrivalRank, QueueEntry, WaitingQueue
from local_backend.sequences.sequence import Row

# Tokens reserved for an answer without a prediction, and the least by which a reservation grows.
_FIRST_TOKENS, _LEAST_GROWTH_TOKENS = 64, 32
_GROWTH = 0.5
# From this many observed answers on, the lengths of waiting rows are predicted again.
_FIRST_LESSON_ANSWERS = 8
# Drafts reserve at most this share of a row's length: another row gains more than longer drafts.
_DRAFT_SHARE = 0.25

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Plan:
    """The scheduler's state of a row.

    Attributes:
        prediction: The predicted length of its answer; ``None`` if unknown.
        reserved_length: Tokens, prompt included, that memory is reserved for.
        ticket: Its place in the order of arrival, which it gets back if it is preempted.
    """

    prediction: Prediction | None = None
    reserved_length: int = 0
    ticket: ArrivalRank | None = None


class Scheduler:
    """The waiting rows, and the memory reserved for the running ones.

    Args:
        scheduling: Policy, predictor and length log.
        max_tokens: The most tokens (rows times columns) that fit in memory; ``None`` is no limit.
    """

    def __init__(self, scheduling: Scheduling, max_tokens: int | None) -> None:
        self._waiting: WaitingQueue[Row] = WaitingQueue()
        self._plans: WeakKeyDictionary[Row, _Plan] = WeakKeyDictionary()
        self._max_tokens = max_tokens
        self._num_draft_tokens = 0
        self._refill_delay = RefillDelay()
        self._is_to_predict_again = False
        self.choose(scheduling)

    def choose(self, scheduling: Scheduling) -> None:
        """Switch to another policy, predictor and length log; the memory limit does not change.

        Raises:
            ValueError: The policy is unknown or the limit is negative.
        """
        self._waiting.reorder(scheduling.policy, max_overtakes=scheduling.max_overtakes)
        self.policy = scheduling.policy
        self._predictor: LengthPredictor | None = scheduling.predictor or ObservedLengths()
        self._num_observed = 0
        self._length_log = scheduling.length_log

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Row]:
        """The waiting rows, in order of arrival."""
        return iter(self._waiting)

    # Waiting -------------------------------------------------------------------------------------

    def add(self, rows: Sequence[Row]) -> None:
        """Queue rows that arrived together."""
        if self._is_to_predict_again:
            self._predict_again()
        now = time.monotonic()
        for row, prediction in zip(rows, self._predict(rows), strict=True):
            if prediction is not None:
                self._plan(row).prediction = _cut(prediction, row.room)
            self._waiting.add(
                row, predicted_tokens=admission_tokens(self._plan(row).prediction, self.policy), now=now
            )

    def remove(self, row: Row) -> None:
        """Remove a waiting row."""
        self._waiting.remove(row)

    def clear(self) -> list[Row]:
        """Empty the queue; returns the rows that waited."""
        return self._waiting.clear()

    def is_time(self, num_running: int, num_free: int) -> bool:
        """Whether to refill free slots now or wait for more of them; called once before each forward."""
        return self._refill_delay.is_time(
            num_running=num_running, num_free=num_free, num_waiting=len(self._waiting)
        )

    def next_that_fits(self, running: Sequence[Row]) -> Row | None:
        """Pop the next row and reserve memory for it.

        Args:
            running: The rows it would run with.

        Returns:
            ``None`` if no row waits or the next one does not fit. The rows behind it then wait too, so that
            smaller rows cannot starve it.
        """
        if not self._waiting:
            return None
        waiter = self._waiting.pop()
        row = waiter.item
        self._plan(row).ticket = waiter.ticket
        self._plan(row).reserved_length = self._within_memory(row, self._first_length(row))
        columns = self.expected_length([*running, row])
        if self._max_tokens is None or (len(running) + 1) * columns <= self._max_tokens:
            return row
        self._waiting.put_back(waiter)
        return None

    def put_back(self, row: Row) -> None:
        """Return a row to its old place in the queue, because it was postponed or preempted."""
        plan = self._plan(row)
        assert plan.ticket is not None
        self._waiting.put_back(QueueEntry(row, admission_tokens(plan.prediction, self.policy), plan.ticket))

    # Memory --------------------------------------------------------------------------------------

    def expected_length(self, running: Sequence[Row]) -> int:
        """Columns that running rows are expected to need, drafts included."""
        longest = max((self._plan(row).reserved_length for row in running), default=0)
        longest += min(self._num_draft_tokens, math.ceil(_DRAFT_SHARE * longest))
        return longest if self._max_tokens is None else min(longest, self._max_tokens)

    def note_draft(self, num_tokens: int) -> None:
        """Note the size of the longest draft, so that admission reserves memory for drafts too."""
        self._num_draft_tokens = max(self._num_draft_tokens, num_tokens)

    def over_reservation(self, running: Sequence[Row]) -> list[Row]:
        """Grow the reservations of rows that have exceeded them.

        Args:
            running: All running rows.

        Returns:
            Rows whose reservation cannot grow enough while the others run, or at all.
        """
        if self._max_tokens is None:
            return []
        aside: list[Row] = []
        for row in running:
            plan = self._plan(row)
            if len(row.token_ids) <= plan.reserved_length:
                continue
            num_written = len(row.token_ids) - row.num_prompt_tokens
            num_more = max(_LEAST_GROWTH_TOKENS, math.ceil(_GROWTH * num_written))
            wanted = self._within_memory(row, len(row.token_ids) + num_more)
            there_is = self._max_tokens // (len(running) - len(aside))
            plan.reserved_length = min(wanted, there_is)
            if there_is < len(row.token_ids):
                expected = float(wanted - row.num_prompt_tokens)
                plan.prediction = Prediction(expected, expected)
                aside.append(row)
        return aside

    def _plan(self, row: Row) -> _Plan:
        return self._plans.setdefault(row, _Plan())

    def _first_length(self, row: Row) -> int:
        prediction = self._plan(row).prediction
        num_tokens = prediction.max_num_tokens if prediction is not None else _FIRST_TOKENS
        return max(row.num_prompt_tokens + math.ceil(num_tokens), len(row.token_ids) + 1)

    def _within_memory(self, row: Row, length: int) -> int:
        return min(length, row.max_length, self._max_tokens or row.max_length)

    # Predictions ---------------------------------------------------------------------------------

    @property
    def _uses_predictions(self) -> bool:
        return self._max_tokens is not None or self.policy != "first_come"

    def _predict(self, rows: Sequence[Row]) -> Sequence[Prediction | None]:
        nothing: list[Prediction | None] = [None] * len(rows)
        if self._predictor is None or not rows or not self._uses_predictions:
            return nothing
        predict = self._predictor.predict
        prompts = [row.prompt_token_ids for row in rows]
        return self._guarded(lambda: predict(prompts, [row.params for row in rows])) or nothing

    def observe(self, row: Row) -> None:
        """Report the length of a complete answer to the predictor and the length log."""
        self._log_length(row)
        predictor = self._predictor
        if self._uses_predictions and isinstance(predictor, LearningPredictor):
            self._guarded(lambda: predictor.observe(row.prompt_token_ids, row.stats.num_tokens))
            self._num_observed += 1
            # Waiting rows are predicted again after 8, 16, 32, ... answers: later ones change less.
            is_power_of_two = not self._num_observed & (self._num_observed - 1)
            if is_power_of_two and self._num_observed >= _FIRST_LESSON_ANSWERS:
                self._is_to_predict_again = True

    def _log_length(self, row: Row) -> None:
        if self._length_log is None:
            return
        try:
            self._length_log.add(row.prompt_token_ids, row.stats.num_tokens, row.params)
        except (OSError, ValueError) as error:  # a failing log must not fail answers
            _logger.warning("answer lengths are no longer logged: %s", error)
            self._length_log = None

    def _predict_again(self) -> None:
        self._is_to_predict_again = False
        rows = [row for row in self._waiting if len(row.token_ids) == row.num_prompt_tokens]
        predictions = self._predict(rows)
        for row, prediction in zip(rows, predictions, strict=True):
            self._plan(row).prediction = None if prediction is None else _cut(prediction, row.room)
        self._waiting.predict_again(
            {row: admission_tokens(self._plan(row).prediction, self.policy) for row in rows}
        )

    def _guarded(self, ask: Callable[[], list[Prediction | None] | None]) -> list[Prediction | None] | None:
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


def _cut(prediction: Prediction, room: int) -> Prediction:
    """Cap a prediction at the ``room`` tokens a row may still emit."""
    return Prediction(min(prediction.num_tokens, room), min(prediction.max_num_tokens, room))
