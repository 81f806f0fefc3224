"""The cost of forwards by width, and the draft width with the highest expected throughput.

A draft token costs the time it adds to the forward that verifies it. That depends on the model, the device,
the rows in the batch and their length: almost nothing while the forward is bound by reading weights, a full
share once it is compute-bound. So the cost is measured, in about a second, and remembered, see
:mod:`~local_backend.models.known_costs`; drafts are cut to the width with the most expected tokens a second.

Knows forwards and seconds. Does not know where drafts come from.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

import torch

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.drafting.draft import Draft
from local_backend.models.architecture import Architecture
from local_backend.models.runner import Forward, ModelRunner, padded_width

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS, _WIDTHS, _CONTEXTS = (1, 4, 16), (1, 2, 4, 8, 16, 32, 64), (128, 768)
MAX_TIMED_ROWS = _ROWS[-1]
_CPU = torch.device("cpu")
_MAX_FORWARD_TOKENS = 256  # larger forwards are extrapolated: their cost is linear in tokens
_SMALL_FORWARD_TOKENS = 32
_REPEATED_TOKENS = 8
_NUM_REPEATS, _NUM_PROBE_REPEATS = 2, 4
_MAX_SECONDS, _MAX_SECONDS_WITH_GRAPHS = 0.8, 3.0  # each graph is recorded first
_TOLERANCE = 1.5


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of a forward; linear interpolation and extrapolation of measurements.

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
        """A cost that is constant up to ``num_tokens`` tokens in all and linear beyond.

        Args:
            num_tokens: Rows times width up to which the cost is constant.
            per_token: Cost of ``num_tokens`` further tokens, in forwards.
        """
        sizes = (1, num_tokens, 2 * num_tokens) if num_tokens > 1 else (1, 2)
        return cls((1,), (1,), sizes, ((tuple(1 + per_token * (size > num_tokens) for size in sizes),),))

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> ForwardCost:
        """Restore the result of :meth:`to_dict`, e.g. read from JSON."""
        seconds = tuple(tuple(tuple(line) for line in rows) for rows in table["seconds"])
        return cls(tuple(table["contexts"]), tuple(table["rows"]), tuple(table["widths"]), seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain sequences and numbers, to save as JSON and pass to an engine again."""
        return asdict(self)

    def __call__(self, *, context: int, rows: int, width: int) -> float:
        """Seconds of a forward of ``rows`` rows, each with ``width`` new tokens after ``context`` others."""
        at, share = _between(self.contexts, context)
        below = self._in_table(self.seconds[at], rows, width)
        if not share:
            return below
        return below + share * (self._in_table(self.seconds[at + 1], rows, width) - below)

    def _in_table(self, table: tuple[tuple[float, ...], ...], rows: int, width: int) -> float:
        at, share = _between(self.rows, rows)
        if len(self.rows) == 1:  # one batch size was measured: the cost depends on the number of tokens
            return self._in_line(table[0], rows * width)
        below = self._in_line(table[at], width)
        return below + share * (self._in_line(table[at + 1], width) - below) if share else below

    def _in_line(self, line: tuple[float, ...], width: int) -> float:
        at, share = _between(self.widths, width)
        return line[at] + share * (line[at + 1] - line[at]) if share else line[at]

    def best_draft_width(self, drafts: Sequence[Draft], *, context: int) -> int:
        """The number of draft tokens per row with the most expected tokens per second.

        All rows of a forward are as wide as the widest, so one width is chosen for all: the one with the
        highest ratio of expected tokens, accepted ones and a bonus for each row, to seconds.

        Args:
            drafts: One for each row; drafts without probabilities are always kept whole.
            context: Tokens of the longest row.
        """
        least = max((len(draft) for draft in drafts if not draft.probabilities), default=0)
        most = max(map(len, drafts), default=0)
        gained = [0.0] * (most + 1)
        gained[0] = len(drafts)
        for draft in drafts:
            for width, place in enumerate(draft.ranked(), 1):
                gained[width] += draft.probabilities[place]
        expected = list(accumulate(gained))

        def rate(width: int) -> float:  # tokens a second
            seconds = self(context=context, rows=len(drafts), width=padded_width(1 + width))
            return expected[width] / seconds

        # Kernel costs rise in steps: a wider forward may pay where a narrower one does not.
        return max(range(least, most + 1), key=rate)  # the narrowest wins ties


def _between(axis: Sequence[int], value: int) -> tuple[int, float]:
    """Locate a value on an axis: the index below it, and the fraction of the way to the next."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    at = min(bisect_right(axis, value) - 1, len(axis) - 2)
    return at, (value - axis[at]) / (axis[at + 1] - axis[at])


class ForwardTimer:
    """Times forwards. What the rows contain does not matter, only how long they are.

    Args:
        forward: What is timed.
        cache: The KV cache of its rows; gets ``max_rows`` rows.
        max_rows: Rows of the largest forward.
        max_positions: Maximum tokens of a row.
        device: Where it computes.
        with_graphs: Whether forwards are replayed as CUDA graphs.
    """

    def __init__(
        self,
        forward: Forward,
        cache: RaggedKVCache,
        *,
        max_rows: int,
        max_positions: int,
        device: torch.device = _CPU,
        with_graphs: bool = False,
    ) -> None:
        self.max_rows, self.with_graphs = max_rows, with_graphs
        self.max_positions = max_positions
        self._device = device
        self._cache, self._forward = cache, forward
        for _ in range(max_rows):
            cache.add_row()

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        architecture: Architecture | None = None,
        *,
        max_rows: int = MAX_TIMED_ROWS,
        is_prepacked: bool = True,
        with_graphs: bool = False,
    ) -> Self:
        """A timer of a ``transformers`` model's forwards.

        Args:
            model: In evaluation mode, with its final weights, dtype and device.
            architecture: Its architecture; read from its configuration unless given.
            max_rows: Rows of the largest forward.
            is_prepacked: Whether forwards use prepacked weights, if the model has them.
            with_graphs: Whether forwards are replayed as CUDA graphs.
        """
        architecture = architecture or Architecture.of(model)
        cache = RaggedKVCache(architecture.num_layers, max_rows=max_rows, max_prefix_bytes=0)
        forward = ModelRunner(model, cache, architecture, is_prepacked=is_prepacked, with_graphs=with_graphs)
        return cls(
            forward,
            cache,
            max_rows=max_rows,
            max_positions=architecture.max_positions,
            device=architecture.device,
            with_graphs=with_graphs,
        )

    @torch.inference_mode()
    def assume_length(self, context: int) -> None:
        """Time forwards after ``context`` tokens from now on."""
        self._cache.assume_length(context)

    def __call__(self, num_rows: int, width: int, num_repeats: int = _NUM_REPEATS) -> float:
        """Seconds of the fastest of ``num_repeats`` forwards of ``num_rows`` rows of ``width`` tokens."""
        if self.with_graphs or num_rows * width <= _SMALL_FORWARD_TOKENS:
            self._seconds(num_rows, width)  # the first run of a shape is slower
        return min(self._seconds(num_rows, width) for _ in range(num_repeats))

    def _seconds(self, num_rows: int, width: int) -> float:
        self._wait()
        started = time.perf_counter()
        self._forward(0, [[0]] * num_rows, [Draft.chain([0] * (width - 1))] * num_rows)
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def still_holds(costs: ForwardCost, seconds_of: ForwardTimer) -> bool:
    """Whether known costs fit the machine as it is now, by two short forwards.

    Compares how much longer a wide forward takes than a narrow one, on which the choice of widths depends.
    Seconds themselves would double whenever another process computes.
    """
    context, num_rows = costs.contexts[0], costs.rows[0]
    narrow, wide = _probes(costs.widths)
    seconds_of.assume_length(context)
    measured = seconds_of(num_rows, wide) / seconds_of(num_rows, narrow)
    known = costs(context=context, rows=num_rows, width=wide) / costs(
        context=context, rows=num_rows, width=narrow
    )
    return 1 / _TOLERANCE <= measured / known <= _TOLERANCE


def measure_forward_cost(seconds_of: ForwardTimer) -> ForwardCost:
    """Time forwards of several widths, batches and contexts.

    Takes about a second; what there is no time to measure is extrapolated linearly by tokens.
    """
    rows = tuple(number for number in _ROWS if number <= seconds_of.max_rows)
    longest = seconds_of.max_positions - 1
    widths = tuple(width for width in _WIDTHS if width <= longest // 2) or (1,)
    contexts = tuple(context for context in _CONTEXTS if context + widths[-1] <= longest) or (
        max(1, longest - widths[-1]),
    )
    began = time.perf_counter()
    deadline = began + (_MAX_SECONDS_WITH_GRAPHS if seconds_of.with_graphs else _MAX_SECONDS)
    seconds_of.assume_length(contexts[0])
    near: list[tuple[float, ...]] = []
    for num_rows in rows:
        if near and time.perf_counter() > deadline:
            break
        measured: dict[int, float] = {}
        for width in _by_what_they_tell(widths):
            if len(measured) > 1 and (
                num_rows * width > _MAX_FORWARD_TOKENS or time.perf_counter() > deadline
            ):
                continue
            measured[width] = seconds_of(num_rows, width)
        if num_rows == rows[0]:
            # Another process may have disturbed one of them, and narrow forwards are what decides.
            for width, seconds in measured.items():
                if num_rows * width <= _REPEATED_TOKENS and time.perf_counter() < 2 * deadline - began:
                    measured[width] = min(seconds, seconds_of(num_rows, width, _NUM_PROBE_REPEATS))
        # A narrower forward that takes longer than a wider one was disturbed: nothing makes one faster.
        line = _line_through(measured, widths)
        near.append(tuple(accumulate(reversed(line), min))[::-1])
    rows = rows[: len(near)]  # larger batches are extrapolated, too
    tables = [tuple(near)]
    for context in contexts[1:]:
        # A longer context adds cost to attention only, per row and per token: two widths measure it.
        seconds_of.assume_length(context)
        probes = _probes(widths)
        far = []
        for num_rows, line_near in zip(rows, near, strict=True):
            # One slow run here would make every wide forward look expensive.
            repeats = _NUM_PROBE_REPEATS if num_rows == rows[0] else _NUM_REPEATS
            added = [
                max(0.0, seconds_of(num_rows, width, repeats) - line_near[widths.index(width)])
                for width in probes
            ]
            slope = max(0.0, added[1] - added[0]) / max(1, probes[1] - probes[0])
            far.append(
                tuple(
                    seconds + added[0] + slope * (width - probes[0])
                    for seconds, width in zip(line_near, widths, strict=True)
                )
            )
        tables.append(tuple(far))
    return ForwardCost(contexts, rows, widths, tuple(tables))


def _probes(widths: Sequence[int]) -> tuple[int, int]:
    """The narrowest and a middle width, which together give the cost per token."""
    return widths[0], widths[len(widths) // 2]


def _by_what_they_tell(widths: Sequence[int]) -> list[int]:
    """The probes first, then the others.

    On a busy machine there may be time for only two. The difference of neighbours would be noise, and the
    widest takes seconds if a model is slow.
    """
    first = _probes(widths)
    return [*dict.fromkeys(first), *(width for width in reversed(widths) if width not in first)]


def _line_through(measured: Mapping[int, float], widths: Sequence[int]) -> list[float]:
    """Seconds at each width, interpolated and extrapolated linearly from the measured widths."""
    known = sorted(measured)
    line = []
    for width in widths:
        at = min(max(0, bisect_right(known, width) - 1), max(0, len(known) - 2))
        low, high = known[at], known[min(at + 1, len(known) - 1)]
        slope = max(0.0, measured[high] - measured[low]) / max(1, high - low)
        line.append(measured.get(width, measured[low] + slope * (width - low)))
    return line
