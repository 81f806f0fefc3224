"""The engine: a model, its KV cache and a thread that decodes all submitted rows in one batch.

Rows can be submitted from any thread and any event loop; they join and leave the batch between forwards
(:mod:`~local_backend.scheduling`). The loop itself is in :mod:`~local_backend.engine.decode_loop`.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NoReturn

import torch

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.drafting import Drafter, make_drafter
from local_backend.drafting.drafter import require_at_least
from local_backend.engine.decode_loop import DecodeLoop
from local_backend.engine.worker import LoopMailbox, ThreadMailbox, Worker
from local_backend.kernels.graphs import Execution
from local_backend.kernels.openmp import release_workers, run_in_short_lived_thread
from local_backend.kernels.prepacked import prepack, repack
from local_backend.models.architecture import Architecture
from local_backend.models.compatibility import verify_compatibility
from local_backend.models.forward_cost import ForwardCost, forward_cost
from local_backend.models.runner import ModelRunner
from local_backend.scheduling.lengths import AdmissionPolicy, Scheduling
from local_backend.scheduling.memory import MemoryBudget
from local_backend.scheduling.running_batch import RunningBatch
from local_backend.scheduling.scheduler import Scheduler
from local_backend.sequences.logits import LogitsProcessorLike, LogitsRules
from local_backend.sequences.outputs import Completion, EngineStats, Update
from local_backend.sequences.request import References, RowMaker, vocabulary_size
from local_backend.sequences.sampling import SamplingParams
from local_backend.sequences.sequence import Row, notify_safely

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_log = logging.getLogger(__name__)


class Engine:
    """Decodes many rows at once with one model.

    Args:
        model: A decoder-only ``transformers`` causal language model.
        tokenizer: Its tokenizer.
        drafter: A drafter's name or a :class:`~local_backend.drafting.Drafter`.
        logits_processors: Applied to every row's logits after those of the model's ``generation_config``; see
            :class:`~local_backend.sequences.sampling.SamplingParams` for their requirements.
        use_generation_config: Whether to use the end tokens, stop strings and logits processors that the
            model's ``generation_config`` has now. Its sampling settings and lengths are never used.
        max_rows: Maximum rows in a forward; further requests wait.
        prefill_chunk_tokens: Maximum prompt tokens prefilled between two decode forwards, so that a long
            prompt does not stall decoding rows; by default 1,024, and 8,192 on a GPU.
        max_prefix_bytes: Memory for the prefix cache; 0 disables it.
        compiled: Compile Llama-like layers, see :mod:`~local_backend.kernels.llama_forward`, with CUDA
            graphs on a GPU, see :mod:`~local_backend.kernels.graphs`; by default if the model is on one GPU.
        prepacked: On a CPU, multiply with copies of the weights, see :mod:`~local_backend.kernels.prepacked`;
            ``None`` does so if the memory for the copies is free, ``False`` prepares no layer.
        width_costs: Forward cost by width; by default measured here, in about a second, see
            :mod:`~local_backend.models.forward_cost`.
        scheduling: Order of admission and memory limit, or a policy's name.

    Attributes:
        make_row: Checks one request and makes its row, which :meth:`submit` starts; see
            :class:`~local_backend.sequences.request.RowMaker`.

    Raises:
        ValueError: A name is unknown, a number is out of range, the memory is too small for any row, what the
            generation config or a processor asks for cannot be applied to drafted tokens, or the model cannot
            be decoded losslessly in a batch, see :class:`~local_backend.models.architecture.Architecture`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: str | Drafter = "autoregressive",
        *,
        logits_processors: Sequence[LogitsProcessorLike] = (),
        use_generation_config: bool = True,
        max_rows: int = 64,
        prefill_chunk_tokens: int | None = None,
        max_prefix_bytes: int = 256 * 2**20,
        compiled: bool | None = None,
        prepacked: bool | None = None,
        width_costs: ForwardCost | None = None,
        scheduling: Scheduling | AdmissionPolicy | None = None,
    ) -> None:
        require_at_least(1, max_rows=max_rows, prefill_chunk_tokens=prefill_chunk_tokens)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.drafter = make_drafter(drafter)
        self.stats = EngineStats()
        architecture = Architecture.of(model)
        self.max_rows, self.max_positions = max_rows, architecture.max_positions
        execution = _prepare(model, architecture, compiled=compiled, prepacked=prepacked)
        self._width_costs = cache(lambda: width_costs or forward_cost(model, architecture, execution))
        if drafter != "autoregressive":  # now, so that no answer waits for it
            run_in_short_lived_thread(self._width_costs)
        scheduling = Scheduling.of(scheduling)
        memory = MemoryBudget.of(model, architecture, max_rows, max_prefix_bytes, scheduling)
        rules = LogitsRules(model, logits_processors, use_generation_config=use_generation_config)
        self.make_row = RowMaker(
            tokenizer, rules, memory.require, self.max_positions, vocabulary_size(model), model.name_or_path
        )
        self._cache = RaggedKVCache(
            architecture.num_layers,
            max_rows=max_rows,
            max_prefix_bytes=memory.max_prefix_bytes,
            max_tokens=memory.max_tokens,
        )
        self._running = RunningBatch(self._cache, max_rows)
        self._scheduler = Scheduler(scheduling, self._running, self._cache, memory, self.stats)
        self._loop = DecodeLoop(
            forward=ModelRunner(model, self._cache, architecture, execution),
            cache=self._cache,
            batch=self._running,
            scheduler=self._scheduler,
            drafter=make_drafter(self.drafter, lambda row: row.params.drafter),
            stats=self.stats,
            width_costs=self._width_costs,
            architecture=architecture,
            vocabulary_size=vocabulary_size(model),
            # On an H100 16 prompts take 109 instead of 181 ms with 8,192.
            prefill_chunk_tokens=prefill_chunk_tokens or (8192 if model.device.type == "cuda" else 1024),
        )
        self._worker = Worker(self, name="local_backend.Engine")
        self._finalizer = weakref.finalize(self, self._worker.close)

    def submit(self, rows: Sequence[Row]) -> None:
        """Start rows; those submitted together are admitted together.

        Raises:
            RuntimeError: The engine is closed.
        """
        release_workers()  # of this thread, which would slow down the engine's
        self._scheduler.submit(rows)
        self._worker.wake()

    def cancel(self, rows: Sequence[Row]) -> None:
        """Cancel rows before the next forward; does nothing for finished ones."""
        if self._scheduler.cancel(rows):
            self._worker.wake_if_open()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        references: Sequence[Sequence[str] | References | None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt and wait for all completions, in the order of the prompts.

        Args:
            prompts: Token ids of each prompt.
            params: For all prompts, or one for each.
            references: For each prompt, text that may be copied.

        Raises:
            ValueError: A prompt is empty or too long, or the lists differ in length; nothing was run then.
            TypeError: A prompt is text, or a single token.
        """
        each_params = params if isinstance(params, Sequence) else [params] * len(prompts)
        each_references = references if references is not None else [None] * len(prompts)
        if not len(prompts) == len(each_params) == len(each_references):
            raise ValueError(
                f"{len(prompts)} prompts, {len(each_params)} params and {len(each_references)} references: "
                "give one of each for every prompt"
            )
        mailboxes = [ThreadMailbox() for _ in prompts]
        rows = [
            self.make_row(prompt, mailbox.put, params=one, references=texts, min_interval_seconds=math.inf)
            for prompt, mailbox, one, texts in zip(
                prompts, mailboxes, each_params, each_references, strict=True
            )
        ]
        try:
            self.submit(rows)
            return [mailbox.completion() for mailbox in mailboxes]
        finally:
            self.cancel(rows)

    def stream(self, row_of: Callable[[Callable[[Update], None]], Row]) -> Iterator[Update]:
        """Submit one row and yield its updates; closing the iterator early cancels the row.

        Args:
            row_of: Makes the row for a listener; see :class:`~local_backend.sequences.request.RowMaker`.

        Raises:
            Exception: The error that ended the row.
        """
        mailbox = ThreadMailbox()
        row = row_of(mailbox.put)
        self.submit([row])
        try:
            while not (update := mailbox.get()).is_last:
                yield update
            yield update
        finally:
            self.cancel([row])

    async def astream(self, row_of: Callable[[Callable[[Update], None]], Row]) -> AsyncIterator[Update]:
        """:meth:`stream` in the running event loop."""
        mailbox = LoopMailbox()
        row = row_of(mailbox.put)
        self.submit([row])
        try:
            while not (update := await mailbox.get()).is_last:
                yield update
            yield update
        finally:
            self.cancel([row])

    @property
    def width_costs(self) -> ForwardCost:
        """Forward cost by width; measured at the first use if nothing is drafted, between two forwards."""
        if self._running and not self._width_costs.cache_info().currsize:
            measured = self._loop.before_next_step(self._width_costs)
            self._worker.wake()
            measured.result()
        return self._width_costs()

    @property
    def scheduling(self) -> Scheduling:
        """Order of admission and memory limit."""
        return self._scheduler.scheduling

    def reschedule(self, scheduling: Scheduling | AdmissionPolicy) -> None:
        """Change the order of admission from the next step on, also for waiting rows; from any thread.

        Raises:
            ValueError: The policy is unknown, or ``max_cache_bytes`` is given and differs from the engine's.
        """
        self._scheduler.reschedule(scheduling)

    @property
    def num_rows(self) -> int:
        """Number of running rows."""
        return len(self._running)

    @property
    def num_wanted_rows(self) -> int:
        """Number of running rows that nobody has cancelled; the others end with the next step."""
        return sum(not row.cancelled for row in self._running.rows)

    @property
    def peak_cache_bytes(self) -> int:
        """The most memory that keys and values have taken so far, prefix cache included."""
        return self._cache.peak_bytes

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, so that rows submitted later reuse none of it; from any thread."""
        self._loop.before_next_step(self._cache.prefixes.clear)  # while no forward reads them
        self._worker.wake_if_open()

    def forget_weights(self) -> None:
        """Drop what was computed from the current weights, after they changed; from any thread.

        Empties the prefix cache and rebuilds prepacked weights, even after changes that torch does not count.
        """
        self._loop.before_next_step(partial(repack, self.model))
        self.forget_prefixes()

    def warm_up(self) -> None:
        """Run first forwards, which are slow, on the engine's thread and wait; leaves no statistics."""
        warm = self._loop.before_next_step(self._loop.warm_up)
        self._worker.wake()
        warm.result()

    def close(self) -> None:
        """End the engine's thread; unfinished rows fail with an error."""
        self._finalizer()
        for row in [*self._running.clear(), *self._scheduler.clear()]:
            error = RuntimeError("the engine was closed before this row was finished")
            notify_safely(row, partial(row.fail, error))

    def step(self) -> bool:
        """One :meth:`~local_backend.engine.decode_loop.DecodeLoop.step`; returns whether rows are left."""
        is_more = self._loop.step()
        if not is_more:
            release_workers()  # they would slow down what computes next: another engine, or the caller
        return is_more

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine cannot be pickled: load the model in each process")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _prepare(
    model: PreTrainedModel, architecture: Architecture, *, compiled: bool | None, prepacked: bool | None
) -> Execution:
    """Install the kernels, then check that the model decodes as alone with them."""
    execution = Execution.of(model, compiled)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each new shape, for a hundred milliseconds
    if prepacked is not False:
        run_in_short_lived_thread(lambda: prepack(model, unasked=prepacked is None))
    try:
        run_in_short_lived_thread(partial(verify_compatibility, model, architecture, execution))
    except ValueError as error:
        if compiled or not execution.is_compiled:
            raise
        _log.warning("layers are not compiled: %s", error)  # without a C compiler, for example
        execution = execution._replace(is_compiled=False)
        run_in_short_lived_thread(partial(verify_compatibility, model, architecture, execution))
    _log.info("%s runs on %s in %s, %s", type(model).__name__, architecture.device, model.dtype, execution)
    return execution
