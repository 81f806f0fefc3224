"""The engine: draft -> verify -> accept -> commit, for every row at once.

Rows join and leave between forwards (:mod:`~local_backend.scheduling.inbox`). :meth:`Engine.step` is the
loop's body and names its phases in order; it does not ask which drafter it holds. Submitting is safe from any
thread and any event loop, and whatever was submitted by then shares the next forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.drafting import Drafter, drafter_of
from local_backend.engine.calls import Calls
from local_backend.engine.decode_loop import DecodeLoop
from local_backend.engine.worker import Worker
from local_backend.models.architecture import Architecture
from local_backend.models.compatibility import verify_compatibility
from local_backend.models.compilation import compile_blocks
from local_backend.models.forward_cost import ForwardCost, LazyForwardCost
from local_backend.models.grouped_attention import read_in_place
from local_backend.models.model_runner import ModelRunner, run_in_short_lived_thread
from local_backend.models.prepacking import prepack
from local_backend.requests.logits import LogitsProcessorLike, LogitsRules
from local_backend.requests.outputs import EngineStats, Update
from local_backend.requests.request import References, RowMaker, vocabulary_size
from local_backend.requests.sampling import SamplingParams
from local_backend.requests.sequence import Row, notify_safely
from local_backend.scheduling.inbox import Inbox
from local_backend.scheduling.lengths import Scheduling
from local_backend.scheduling.memory_budget import MemoryBudget
from local_backend.scheduling.running_batch import RunningBatch
from local_backend.scheduling.waiting_queue import AdmissionPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Engine(Calls):
    """Decodes many rows at once with one model.

    Args:
        model: A decoder-only ``transformers`` causal language model.
        tokenizer: Its tokenizer.
        drafter: A drafter's name or a :class:`~local_backend.drafting.Drafter`.
        logits_processors: Applied to every row's scores after those of the model's ``generation_config``; see
            :class:`~local_backend.requests.sampling.SamplingParams` for what they must be.
        use_generation_config: Whether the end tokens, stop strings and logits processors of the model's
            ``generation_config`` count, as they are now. Its sampling settings and lengths never do.
        max_rows: Rows in a forward, at most; further requests wait.
        prefill_chunk_tokens: Prompt tokens read between two decode forwards, at most, so that a long prompt
            does not stall the rows that are writing.
        max_prefix_bytes: Memory for what finished rows leave behind, for rows that begin alike; 0 is none.
        stream_interval_seconds: News of a row come at most so often.
        grouped_attention_in_place: On a CPU, let a model with grouped heads read keys and values where they
            lie; sets its attention implementation, which ``model.generate`` then uses, too.
        compiled: Whether what stands between attentions runs through ``torch.compile``, or in which of its
            modes, e.g. ``"reduce-overhead"``; see :mod:`~local_backend.models.compilation`.
        prepacked: On a CPU, whether forwards multiply with copies of the weights that are laid out for few
            columns, see :mod:`~local_backend.models.prepacking`; ``None`` is where that is faster and
            the memory for the copies is free.
        width_costs: What forwards cost by width, e.g. measured before; by default it is measured when it is
            first asked for, by a drafter that says how likely its tokens are.
        scheduling: Who begins first, and within how much memory; a policy's name will do.

    Raises:
        ValueError: The drafter's or policy's name is unknown, a number is out of range, the memory is too
            small for any row, the generation config or a processor asks for something that cannot be applied
            to drafted tokens, or the model cannot be decoded losslessly in a batch, see
            :class:`~local_backend.models.architecture.Architecture`.
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
        prefill_chunk_tokens: int = 1024,
        max_prefix_bytes: int = 256 * 2**20,
        stream_interval_seconds: float = 0.02,
        grouped_attention_in_place: bool = True,
        compiled: bool | str = False,
        prepacked: bool | None = None,
        width_costs: ForwardCost | None = None,
        scheduling: Scheduling | AdmissionPolicy | None = None,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("prefill_chunk_tokens", prefill_chunk_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.max_rows = max_rows
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.drafter = drafter_of(drafter)
        self.stats = EngineStats()
        architecture = Architecture.of(model)
        if grouped_attention_in_place:
            read_in_place(model)
        if compiled:
            compile_blocks(model, None if compiled is True else compiled)
        elif prepacked is not False:
            run_in_short_lived_thread(lambda: prepack(model, unasked=prepacked is None))
        run_in_short_lived_thread(partial(verify_compatibility, model, architecture))
        self._architecture = architecture
        self.max_positions = architecture.max_positions
        scheduling = Scheduling.of(scheduling)
        self._memory = MemoryBudget.of(
            model,
            architecture,
            max_rows=max_rows,
            max_prefix_bytes=max_prefix_bytes,
            max_bytes=scheduling.max_cache_bytes,
        )
        num_token_ids = vocabulary_size(model)
        self._make_row = RowMaker(
            tokenizer,
            LogitsRules(model, logits_processors, use_generation_config=use_generation_config),
            self._memory.require,
            max_positions=self.max_positions,
            vocabulary_size=num_token_ids,
        )
        self._cache = RaggedKVCache(
            architecture.num_layers,
            max_rows=max_rows,
            max_prefix_bytes=self._memory.max_prefix_bytes,
            max_tokens=self._memory.max_tokens,
        )
        self._width_costs = LazyForwardCost(
            model, architecture, width_costs, is_prepacked=prepacked is not False
        )
        self._running = RunningBatch(self._cache, max_rows)
        self._intake = Inbox(
            scheduling, running=self._running, cache=self._cache, memory=self._memory, stats=self.stats
        )
        self._loop = DecodeLoop(
            model=model,
            runner=ModelRunner(model, self._cache, architecture, is_prepacked=prepacked is not False),
            cache=self._cache,
            batch=self._running,
            inbox=self._intake,
            drafter=self.drafter,
            stats=self.stats,
            width_costs=self._width_costs,
            vocabulary_size=num_token_ids,
            keeps_logits=architecture.keeps_logits,
            prefill_chunk_tokens=prefill_chunk_tokens,
            stream_interval_seconds=stream_interval_seconds,
        )
        self._worker = Worker(self, name="local_backend.Engine")
        self._finalizer = weakref.finalize(self, self._worker.close)

    # Requests ------------------------------------------------------------------------------------

    def make_row(
        self,
        prompt: Sequence[int],
        listener: Callable[[Update], None],
        *,
        params: SamplingParams | None = None,
        references: Sequence[str] | References | None = None,
        num_context_tokens: int = 0,
    ) -> Row:
        """Check one request and make its row; :meth:`submit` starts it.

        Args:
            prompt: Token ids to continue.
            listener: Told of every update, on the engine's thread; it must return at once.
            params: How tokens are chosen.
            references: Text that may be copied.
            num_context_tokens: How many last tokens of the prompt are the beginning of the text that is
                written, so that the space between the two is kept.

        Raises:
            ValueError: The prompt is empty, leaves no room in the model's positions or in the memory or holds
                ids outside its vocabulary; or a processor of ``params`` cannot be applied to drafted tokens.
            TypeError: The prompt is text, or a single token.
        """
        return self._make_row(
            prompt, listener, params or SamplingParams(), references, num_context_tokens=num_context_tokens
        )

    def submit(self, rows: Sequence[Row]) -> None:
        """Start rows; those submitted together are admitted together.

        Raises:
            RuntimeError: The engine is closed.
        """
        self._intake.submit(rows)
        self._worker.wake()

    def cancel(self, rows: Sequence[Row]) -> None:
        """Free rows before the next forward; does nothing for those that have ended."""
        if self._intake.cancel(rows) and not self._worker.is_closing:
            self._worker.wake()

    @property
    def width_costs(self) -> ForwardCost:
        """What forwards cost by width; measured now, in about a second, if it was not before."""
        return self._width_costs()

    @property
    def scheduling(self) -> Scheduling:
        """Who begins first, and within how much memory."""
        return self._intake.scheduling

    def reschedule(self, scheduling: Scheduling | AdmissionPolicy) -> None:
        """Order rows otherwise from the next step on, those that wait already included; from any thread.

        Raises:
            ValueError: The policy is unknown, or another memory is asked for: that of an engine is fixed.
        """
        self._intake.reschedule(scheduling)

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self._running)

    @property
    def num_free(self) -> int:
        """Rows that could be begun now without waiting; negative while others wait already."""
        return self._running.num_free - len(self._intake)

    @property
    def cache_bytes(self) -> int:
        """Memory that keys and values take now, those of kept beginnings included."""
        return self._cache.num_bytes

    @property
    def peak_cache_bytes(self) -> int:
        """The most memory that keys and values have taken so far."""
        return self._cache.peak_bytes

    def forget_prefixes(self) -> None:
        """Drop what was computed with the weights as they are, e.g. when they have changed; from any thread.

        Keys and values kept of finished rows: no row that is submitted from then on begins with them. And
        copies of weights, which are made again.
        """
        self._loop.forget_prefixes()  # done on the engine's thread, which may be reading them
        if not self._worker.is_closing:
            self._worker.wake()

    def close(self) -> None:
        """End the engine's thread; whoever still waits is told so."""
        self._finalizer()
        for row in [*self._running.clear(), *self._intake.clear()]:
            notify_safely(
                row, partial(row.fail, RuntimeError("the engine was closed before this row was finished"))
            )

    def step(self) -> bool:
        """One round of the decoding loop, see :meth:`~local_backend.engine.decode_loop.DecodeLoop.step`.

        Returns:
            Whether rows are left.
        """
        return self._loop.step()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
