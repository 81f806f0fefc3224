"""Static micro-batches: rows of similar predicted length together, planned before they run.

After Zheng et al., arXiv 2305.13144: bins of predicted lengths, variable batch size, failure collection and
recomputation, predicted maxima; each part can be turned off. Beyond the paper, a preempted row may resume
where it stopped. Knows predictions and token counts. Does not know what runs a batch: the engine
(:mod:`~benchmarks.paper_scheduling.static_run`) and the replay (:mod:`~benchmarks.paper_scheduling.replay`)
both do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from local_backend.scheduling.lengths import Prediction

_GROWTH = 1.5  # growth of a row's limit when the row exceeds it
_MAX_SHARE_ASIDE = 0.5  # of the memory; above it, preempted rows resume before the others are done


@dataclass(frozen=True, slots=True)
class StaticOptions:
    """Which parts of the method are used, and their sizes.

    Attributes:
        batch_rows: Rows of a batch; with a variable batch size, of a batch of the longest answers.
        max_tokens: An answer is no longer than this.
        group_rows: Rows that are planned together; a group finishes before the next starts.
        bin_tokens: Width of a bin of predicted lengths; ``None`` batches in order of arrival.
        variable_batch: Whether batches of short answers hold more rows, as many as the memory of
            ``batch_rows`` answers of ``max_tokens`` allows; preempted rows may hold half as much on top.
        collect_failures: Whether a row that exceeds its bin is preempted; otherwise its batch continues.
        predict_maximum: Whether rows are binned by their predicted maximum, not by their expected length.
        resume: Whether a preempted row resumes where it stopped; otherwise it restarts.
        max_rows: Maximum rows of a batch, however short the answers.

    Raises:
        ValueError: A number is below 1, or a part that needs bins is used without them.
    """

    batch_rows: int = 16
    max_tokens: int = 512
    group_rows: int = 256
    bin_tokens: int | None = 50
    variable_batch: bool = True
    collect_failures: bool = True
    predict_maximum: bool = True
    resume: bool = True
    max_rows: int = 64

    def __post_init__(self) -> None:
        for name in ("batch_rows", "max_tokens", "group_rows", "bin_tokens", "max_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.bin_tokens is None and (self.variable_batch or self.collect_failures):
            raise ValueError(
                "variable_batch and collect_failures need the limits of bins: give bin_tokens, too"
            )

    @classmethod
    def vanilla(cls, *, batch_rows: int = 16, max_tokens: int = 512, group_rows: int = 256) -> StaticOptions:
        """The baseline: batches in order of arrival, each as long as its longest answer."""
        return cls(
            batch_rows,
            max_tokens,
            group_rows,
            bin_tokens=None,
            variable_batch=False,
            collect_failures=False,
            predict_maximum=False,
            resume=False,
        )

    @property
    def memory_tokens(self) -> int:
        """Tokens that the KV cache may hold at once."""
        return self.batch_rows * self.max_tokens


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that run together until each has ended or reached its limit; no row joins later.

    Attributes:
        rows: Numbers of the rows in their group.
        limits: Tokens at which each row is stopped, including those decoded before.
        starts: Tokens that each row has decoded before and keeps.
    """

    rows: tuple[int, ...]
    limits: tuple[int, ...]
    starts: tuple[int, ...]


class MicroBatches:
    """Plans the batches of one group, and takes back the rows that exceeded their limit.

    Args:
        predictions: One for each row; a row without one is assumed to reach ``options.max_tokens``.
        options: Which parts of the method are used.
        max_tokens: Maximum length of each answer; by default ``options.max_tokens``.
        prompt_tokens: Tokens of each prompt, which also take memory; none by default.

    Raises:
        ValueError: The lists differ in length, or an answer may be longer than ``options.max_tokens``.
    """

    def __init__(
        self,
        predictions: Sequence[Prediction | None],
        options: StaticOptions,
        *,
        max_tokens: Sequence[int] | None = None,
        prompt_tokens: Sequence[int] | None = None,
    ) -> None:
        num_rows = len(predictions)
        self._options = options
        self._most = list(max_tokens) if max_tokens is not None else [options.max_tokens] * num_rows
        self._prompts = list(prompt_tokens) if prompt_tokens is not None else [0] * num_rows
        if not num_rows == len(self._most) == len(self._prompts):
            raise ValueError(
                f"{num_rows} predictions, {len(self._most)} max_tokens and {len(self._prompts)} "
                "prompt_tokens: give one of each for every row"
            )
        if any(not 1 <= most <= options.max_tokens for most in self._most):
            raise ValueError(f"every row's max_tokens must lie between 1 and {options.max_tokens}")
        self._limits = [self._bin_of(prediction) for prediction in predictions]
        self._starts = [0] * num_rows
        rows = list(range(num_rows))
        if options.bin_tokens is not None:
            rows.sort(key=lambda row: -self._limits[row])  # stable: by arrival within a bin
        self._waiting = deque(rows)
        self._aside: list[int] = []
        self.num_failures = 0

    def next(self) -> MicroBatch | None:
        """The next batch; ``None`` when no row is left.

        A batch starts with the longest bin and is filled from the next one, so that no batch runs with only
        the rest of a bin. Preempted rows come last, or as soon as they hold more than half of the memory.
        """
        held = self._held()
        if self._aside and (not self._waiting or held > _MAX_SHARE_ASIDE * self._options.memory_tokens):
            self._waiting.extendleft(sorted(self._aside, key=self._limits.__getitem__))
            self._aside.clear()
            held = 0
        if not self._waiting:
            return None
        rows = [self._waiting.popleft() for _ in range(self._num_fitting(held))]
        longest = max(self._limits[row] for row in rows)
        if not self._options.collect_failures:
            longest = self._options.max_tokens
        batch = MicroBatch(
            tuple(rows),
            tuple(min(longest, self._most[row]) for row in rows),
            tuple(self._starts[row] for row in rows),
        )
        for row, limit in zip(batch.rows, batch.limits, strict=True):
            self._limits[row] = limit
        return batch

    def preempt(self, row: int) -> None:
        """Preempt a row of the last batch that reached its limit but not its maximum length."""
        limit, options = self._limits[row], self._options
        assert options.bin_tokens is not None
        self.num_failures += 1
        if options.resume:
            self._starts[row] = limit
        self._limits[row] = self._upper_edge(max(limit + 1, _GROWTH * limit))
        self._aside.append(row)

    def _bin_of(self, prediction: Prediction | None) -> int:
        options = self._options
        if prediction is None or options.bin_tokens is None:
            return options.max_tokens
        return self._upper_edge(
            prediction.max_num_tokens if options.predict_maximum else prediction.num_tokens
        )

    def _upper_edge(self, num_tokens: float) -> int:
        width = self._options.bin_tokens or self._options.max_tokens
        return min(self._options.max_tokens, width * max(1, math.ceil(num_tokens / width)))

    def _held(self) -> int:
        """Tokens of preempted rows that stay in the KV cache."""
        if not self._options.resume:
            return 0
        return sum(self._prompts[row] + self._starts[row] for row in self._aside)

    def _num_fitting(self, held: int) -> int:
        """How many of the waiting rows form the next batch; at least one."""
        options = self._options
        if not options.variable_batch:
            return min(options.batch_rows, len(self._waiting))
        room, longest_prompt = options.memory_tokens - held, 0
        # Held tokens may come on top, as a forward of fewer rows would cost as much. Long prompts may not.
        least = options.batch_rows if not any(self._prompts) else 1
        # Sorted by limit, so the first is the longest; all rows of a batch share one buffer of that length.
        limit = self._limits[self._waiting[0]]
        for number, row in enumerate(self._waiting):
            longest_prompt = max(longest_prompt, self._prompts[row])
            limit = max(limit, self._limits[row])  # preempted rows rarely precede longer ones
            is_full = number >= options.max_rows or (number + 1) * (longest_prompt + limit) > room
            if is_full and number >= least:
                return number
        return len(self._waiting)
