"""The cost of forwards by width, and the draft width with the highest expected throughput.

A draft token costs the time it adds to the forward that verifies it. That depends on the model, the device,
the rows in the batch and their length: almost nothing while the forward is bound by reading weights, a full
share once it is compute-bound. So the cost is measured when an engine is created, in about a second, and
drafts are cut to the width with the most expected tokens a second.

Knows forwards and seconds. Does not know where drafts come from.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.drafting.draft import Draft
from local_backend.kernels.graphs import AS_THEY_ARE, Execution
from local_backend.kernels.prepacked import has_prepacked
from local_backend.models.architecture import Architecture
from local_backend.models.runner import ModelRunner, padded_width

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS, _WIDTHS, _CONTEXTS = (1, 4, 16), (1, 2, 4, 8, 16, 32, 64), (128, 768)
_MAX_FORWARD_TOKENS = 256  # larger forwards are extrapolated: their cost is linear in tokens
_NARROW = 8  # tokens; forwards of at most as many are timed twice
# Of an answer in parts, in tokens; of their prompts those that are read for each part.
_PLAIN_CONTEXT, _PART_CONTEXT, _OUTLINE_TOKENS, _PROMPT_TOKENS = 150, 600, 30, 32
_NUM_REPEATS = 3  # the first run of a shape is slower
_MAX_SECONDS, _MAX_SECONDS_WITH_GRAPHS = 0.8, 3.0  # each graph is recorded first

_measured: WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], ForwardCost]] = WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of a forward; linear interpolation and extrapolation of measurements.

    ``pydantic.TypeAdapter(ForwardCost)`` writes it as JSON and reads it, to pass to an engine again.

    Attributes:
        contexts: Tokens before the new ones, ascending.
        rows: Rows of the batch, ascending.
        widths: New tokens of each row, ascending.
        seconds: Indexed by context, rows and width.

    Raises:
        ValueError: The table does not have the shape of its axes, or an axis does not ascend.
    """

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    widths: tuple[int, ...]
    seconds: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        for name in ("contexts", "rows", "widths"):
            axis = getattr(self, name)
            if not axis or list(axis) != sorted(set(axis)):
                raise ValueError(f"{name} must ascend and not be empty, got {axis}")
        shape = (len(self.contexts), len(self.rows), len(self.widths))
        tables = [[len(line) for line in table] for table in self.seconds]
        if tables != [[shape[2]] * shape[1]] * shape[0]:
            raise ValueError(f"seconds must be {shape[0]} contexts x {shape[1]} rows x {shape[2]} widths")

    @classmethod
    def flat(cls, num_tokens: int, per_token: float = 1.0) -> ForwardCost:
        """A cost that is constant up to ``num_tokens`` tokens in all, rows times width, and linear beyond.

        So many further tokens cost ``per_token`` forwards.
        """
        sizes = (1, num_tokens, 2 * num_tokens) if num_tokens > 1 else (1, 2)
        return cls((1,), (1,), sizes, ((tuple(1 + per_token * (size > num_tokens) for size in sizes),),))

    def __call__(self, *, context: int, rows: int, width: int) -> float:
        """Seconds of a forward of ``rows`` rows, each with ``width`` new tokens after ``context`` others."""
        if len(self.rows) == 1:  # one batch size was measured: the cost depends on the number of tokens
            rows, width = 1, rows * width
        return _interpolate(
            self.contexts,
            context,
            lambda table: _interpolate(
                self.rows,
                rows,
                lambda line: _interpolate(self.widths, width, self.seconds[table][line].__getitem__),
            ),
        )

    def splitting_gain(self, num_answers: int, num_parts: int, part_tokens: int) -> float:
        """How many times as fast ``num_answers`` answers are if each is written as so many parts at once.

        An outline is written before the parts, whose prompts are longer than that of a whole answer.
        """
        whole = num_parts * part_tokens * self(context=_PLAIN_CONTEXT, rows=num_answers, width=1)
        outline = _OUTLINE_TOKENS * self(context=_PART_CONTEXT, rows=num_answers, width=1)
        prompts = num_answers * num_parts * self(context=_PART_CONTEXT, rows=1, width=_PROMPT_TOKENS)
        parts = part_tokens * self(context=_PART_CONTEXT, rows=num_answers * num_parts, width=1)
        return whole / (outline + prompts + parts)

    def best_draft_width(self, drafts: Sequence[Draft], *, context: int) -> int:
        """The number of draft tokens per row with the most expected tokens, bonus included, per second.

        All rows of a forward are as wide as the widest, so one width is chosen for all. Drafts without
        probabilities are always kept whole. ``context`` are the tokens of the longest row.
        """
        least = max((len(draft) for draft in drafts if not draft.probabilities), default=0)
        most = max(map(len, drafts), default=0)
        gained = [0.0] * (most + 1)
        gained[0] = len(drafts)
        for draft in drafts:
            for width, node in enumerate(draft.ranked(), 1):
                gained[width] += draft.probabilities[node]
        expected = list(accumulate(gained))

        def rate(width: int) -> float:  # tokens a second
            seconds = self(context=context, rows=len(drafts), width=padded_width(1 + width))
            return expected[width] / seconds

        # Kernel costs rise in steps: a wider forward may pay where a narrower one does not.
        return max(range(least, most + 1), key=rate)  # the narrowest wins ties


def _interpolate(axis: Sequence[int], value: int, at: Callable[[int], float]) -> float:
    """Linear between two indices of an axis and beyond its last, constant below its first."""
    if len(axis) == 1 or value <= axis[0]:
        return at(0)
    index = min(bisect_right(axis, value) - 1, len(axis) - 2)
    share = (value - axis[index]) / (axis[index + 1] - axis[index])
    below = at(index)
    return below + share * (at(index + 1) - below) if share else below


def forward_cost(
    model: PreTrainedModel, architecture: Architecture, execution: Execution = AS_THEY_ARE
) -> ForwardCost:
    """The cost of a model's forwards, measured once for each model in this process. Thread-safe.

    The model is in evaluation mode, with its final weights, dtype and device.
    """
    key = (execution, has_prepacked(model), model.dtype, model.device, torch.get_num_threads())
    with _lock:
        costs = _measured.setdefault(model, {})
        if key not in costs:
            costs[key] = measure_forward_cost(ForwardTimer(model, architecture, execution))
        return costs[key]


class ForwardTimer:
    """Times forwards of at most ``max_rows`` rows, whatever these contain."""

    def __init__(
        self,
        model: PreTrainedModel,
        architecture: Architecture,
        execution: Execution = AS_THEY_ARE,
        *,
        max_rows: int = _ROWS[-1],
    ) -> None:
        self.max_rows, self.max_positions = max_rows, architecture.max_positions
        self.max_seconds = _MAX_SECONDS_WITH_GRAPHS if execution.with_graphs else _MAX_SECONDS
        self._cache = RaggedKVCache(architecture.num_layers, max_rows=max_rows, max_prefix_bytes=0)
        self._forward = ModelRunner(model, self._cache, architecture, execution)
        self._device = architecture.device
        for _ in range(max_rows):
            self._cache.add_row()

    @torch.inference_mode()
    def __call__(self, context: int, num_rows: int, width: int) -> float:
        """Seconds of the fastest of a few forwards: ``width`` tokens in each row after ``context`` others."""
        self._cache.assume_length(context)
        return min(self._seconds(num_rows, width) for _ in range(_NUM_REPEATS))

    def _seconds(self, num_rows: int, width: int) -> float:
        self._wait()
        started = time.perf_counter()
        self._forward(0, [[0]] * num_rows, [Draft.chain([0] * (width - 1))] * num_rows)
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_forward_cost(timer: ForwardTimer) -> ForwardCost:
    """Time forwards in about a second; what there is no time for is extrapolated linearly by tokens."""
    longest = timer.max_positions - 1
    widths = tuple(width for width in _WIDTHS if width <= longest // 2) or (1,)
    contexts = tuple(context for context in _CONTEXTS if context + widths[-1] <= longest) or (
        max(1, longest - widths[-1]),
    )
    # The narrowest and a middle width come first: together they give the cost per token. The difference of
    # neighbours would be noise, and the widest takes seconds if a model is slow.
    probes = list(dict.fromkeys((widths[0], widths[len(widths) // 2])))
    ordered = [*probes, *(width for width in reversed(widths) if width not in probes)]
    deadline = time.perf_counter() + timer.max_seconds
    rows: list[int] = []
    tables: list[list[tuple[float, ...]]] = [[] for _ in contexts]
    for num_rows in (number for number in _ROWS if number <= timer.max_rows):
        if rows and time.perf_counter() > deadline:
            break  # larger batches are extrapolated
        rows.append(num_rows)
        near = _fill(_time_widths(timer, contexts[0], num_rows, ordered, deadline), widths)
        tables[0].append(near)
        for context, table in zip(contexts[1:], tables[1:], strict=True):
            # A longer context adds cost to attention only, per row and per token: two widths measure it.
            far = _time_widths(timer, context, num_rows, probes, deadline)
            added = {width: max(0.0, seconds - near[widths.index(width)]) for width, seconds in far.items()}
            table.append(tuple(map(sum, zip(near, _fill(added, widths), strict=True))))
    return ForwardCost(contexts, tuple(rows), widths, tuple(map(tuple, tables)))


def _time_widths(
    timer: ForwardTimer, context: int, num_rows: int, widths: Sequence[int], deadline: float
) -> dict[int, float]:
    """Seconds by width, of the first two widths and of those for which there is time."""
    seconds: dict[int, float] = {}
    # Narrow forwards decide, and another process may disturb one: they are timed again after the others.
    for width in [*widths, *(width for width in widths if num_rows * width <= _NARROW)]:
        is_too_long = num_rows * width > _MAX_FORWARD_TOKENS or time.perf_counter() > deadline
        if len(seconds) < 2 or not is_too_long:
            seconds[width] = min(timer(context, num_rows, width), seconds.get(width, math.inf))
    return seconds


def _fill(measured: Mapping[int, float], widths: Sequence[int]) -> tuple[float, ...]:
    """Seconds at each width from those that were measured."""
    known = sorted(measured)
    # A narrower forward that took longer than a wider one was disturbed: nothing makes one faster.
    bounded = list(accumulate((measured[width] for width in reversed(known)), min))[::-1]
    return tuple(_interpolate(known, width, bounded.__getitem__) for width in widths)
