"""The engine: draft -> verify -> accept -> commit, for every row at once.

Rows join and leave between forwards (:mod:`~local_backend.intake`). :meth:`Engine.step` is the loop's body
and names its phases in order; it does not ask which drafter it holds. Submitting is safe from any thread and
any event loop, and whatever was submitted by then shares the next forward.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from local_backend.architecture import Architecture
from local_backend.calls import Calls
from local_backend.choice import chooser, most_likely
from local_backend.compilation import compile_blocks
from local_backend.draft import EMPTY_DRAFT, Draft, Outcome
from local_backend.drafters import Drafter, drafter_of
from local_backend.engine_stats import EngineStats
from local_backend.forward import Forward, decode_width, widest_within
from local_backend.grouped_attention import read_in_place
from local_backend.intake import Intake
from local_backend.kv_cache import RowsCache
from local_backend.logits import LogitsProcessorLike, LogitsRules
from local_backend.prepacked import lay_out_anew, prepack
from local_backend.references import References
from local_backend.row_maker import RowMaker, vocabulary_size
from local_backend.running_rows import RunningRows
from local_backend.sampling import SamplingParams
from local_backend.scheduling.admission import AdmissionPolicy
from local_backend.scheduling.memory import RowMemory
from local_backend.scheduling.options import Scheduling
from local_backend.sequence import Row, Update, guarded
from local_backend.trial import check_by_trial
from local_backend.verification import verify
from local_backend.width_costs import KNOWN_COSTS, WidthCosts
from local_backend.worker import Worker, on_passing_thread

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Prompts are not read by the forward that verifies first drafts where more columns of it would be of no use:
# those of shorter prompts, and where the model cannot leave out their scores, those of all prompts.
_FEW_COLUMNS = 32


class Engine(Calls):
    """Decodes many rows at once with one model.

    Args:
        model: A decoder-only ``transformers`` causal language model.
        tokenizer: Its tokenizer.
        drafter: A drafter's name or a :class:`~local_backend.drafters.Drafter`.
        logits_processors: Applied to every row's scores after those of the model's ``generation_config``; see
            :class:`~local_backend.sampling.SamplingParams` for what they must be.
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
            modes, e.g. ``"reduce-overhead"``; see :mod:`~local_backend.compilation`.
        prepacked: On a CPU, whether forwards multiply with copies of the weights that are laid out for few
            columns, see :mod:`~local_backend.prepacked`; ``None`` is where that is faster and the memory for
            the copies is free.
        width_costs: What forwards cost by width, e.g. measured before; by default it is measured when it is
            first asked for, by a drafter that says how likely its tokens are.
        scheduling: Who begins first, and within how much memory; a policy's name will do.

    Raises:
        ValueError: The drafter's or policy's name is unknown, a number is out of range, the memory is too
            small for any row, the generation config or a processor asks for something that cannot be applied
            to drafted tokens, or the model cannot be decoded losslessly in a batch, see
            :class:`~local_backend.architecture.Architecture`.
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
        width_costs: WidthCosts | None = None,
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
            on_passing_thread(lambda: prepack(model, unasked=prepacked is None))
        on_passing_thread(partial(check_by_trial, model, architecture))
        self._architecture = architecture
        self.max_positions = architecture.max_positions
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._stream_interval_seconds = stream_interval_seconds
        scheduling = Scheduling.of(scheduling)
        self._memory = RowMemory.of(
            model,
            architecture,
            max_rows=max_rows,
            max_prefix_bytes=max_prefix_bytes,
            max_bytes=scheduling.max_cache_bytes,
        )
        self._vocabulary_size = vocabulary_size(model)
        self._make_row = RowMaker(
            tokenizer,
            LogitsRules(model, logits_processors, use_generation_config=use_generation_config),
            self._memory,
            max_positions=self.max_positions,
            vocabulary_size=self._vocabulary_size,
        )
        self._cache = RowsCache(
            architecture.num_layers,
            max_rows=max_rows,
            max_prefix_bytes=self._memory.max_prefix_bytes,
            max_tokens=self._memory.max_tokens,
        )
        self._is_prepacked = prepacked is not False
        self._forward = Forward(model, self._cache, architecture, is_prepacked=self._is_prepacked)
        self._width_costs = width_costs
        self._running = RunningRows(self._cache, max_rows)
        self._intake = Intake(
            scheduling, running=self._running, cache=self._cache, memory=self._memory, stats=self.stats
        )
        self._is_to_forget = False
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
    def width_costs(self) -> WidthCosts:
        """What forwards cost by width; measured now, in about a second, if it was not before."""
        if self._width_costs is None:
            self._width_costs = KNOWN_COSTS.of(
                self.model, self._architecture, is_prepacked=self._is_prepacked
            )
        return self._width_costs

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
        copies of weights, which are made anew.
        """
        self._is_to_forget = True  # done on the engine's thread, which may be reading them
        if not self._worker.is_closing:
            self._worker.wake()

    def close(self) -> None:
        """End the engine's thread; whoever still waits is told so."""
        self._finalizer()
        for row in [*self._running.clear(), *self._intake.clear()]:
            guarded(
                row, partial(row.fail, RuntimeError("the engine was closed before this row was finished"))
            )

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The loop ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> bool:
        """Admit, prefill a chunk, make room, then one forward for every row that is writing.

        Where nobody writes yet, that forward reads the end of the prompts, too.

        Returns:
            Whether rows are left.
        """
        try:
            if self._is_to_forget:
                self._forget()
            self._intake.receive()
            self._intake.admit()
            self._prefill()
            self._intake.make_room()
            if rows := self._running.writing:
                drafts = self._propose(rows)
                logits = self._forward(0, [row.unread for row in rows], drafts)
                assert logits is not None
                outcomes = self._verify(rows, drafts, logits)
                self._commit(rows, drafts, outcomes)
                self.drafter.observe(rows, outcomes)
                self._retire(rows)
        except Exception as error:
            self._fail_all(error)
        return bool(self._running or self._intake)

    def _forget(self) -> None:
        """Drop what was kept of finished rows, and copies of weights that may have changed."""
        self._is_to_forget = False
        self._cache.forget_prefixes()
        lay_out_anew(self.model)

    def _prefill(self) -> None:
        """Read one chunk of the prompts that are not yet read."""
        rows = self._running.prefilling
        if not rows:
            return
        first_place = len(self._running.writing)
        num_left = [row.num_to_prefill for row in rows]
        room = self._cache.most_new_tokens(first_place, len(rows))
        num_new = min(max(num_left), max(1, self._prefill_chunk_tokens // len(rows)), room)
        # One forward less, where it makes nobody wait and few columns are read that hold nothing.
        is_last = first_place == 0 and max(num_left) <= num_new < room
        # Scores of a whole chunk, of which one column is wanted, would take the memory of the answer's.
        num_idle = max(num_left) - (min(num_left) if self._architecture.keeps_logits else 0)
        if is_last and num_idle <= _FEW_COLUMNS:
            self._running.begin_writing(most_unread=num_new)
            return
        chunks = [
            row.token_ids[row.num_cached : row.num_cached + min(num_new, row.num_to_prefill)] for row in rows
        ]
        self._forward(first_place, chunks, [EMPTY_DRAFT] * len(rows), with_logits=False)
        self.stats.num_prefill_forwards += 1
        self.stats.note_forward(len(rows), max(map(len, chunks)), sum(map(len, chunks)))
        for place, (row, chunk) in enumerate(zip(rows, chunks, strict=True), first_place):
            self._cache.commit(place, range(len(chunk)))
            row.num_cached += len(chunk)
            row.stats.num_prefilled += len(chunk)
            self.stats.num_prefilled_tokens += len(chunk)
        self._running.begin_writing()

    def _propose(self, rows: Sequence[Row]) -> list[Draft]:
        """The drafter's guesses, as far as they can be read and emitted, there is room, and they pay."""
        num_unread = max(len(row.unread) for row in rows)
        widest = widest_within(self._cache.most_new_tokens(0, len(rows)) - num_unread + 1)
        drafts = [
            draft.within_vocabulary(self._vocabulary_size)
            .ending_with(row.end_token_ids)
            .truncated(max_tokens=widest - 1, max_depth=row.room - 1)
            for row, draft in zip(rows, self.drafter.propose(rows), strict=True)
        ]
        if any(draft.probabilities for draft in drafts):
            width = self.width_costs.best_width(drafts, context=max(len(row.token_ids) for row in rows))
            drafts = [draft.likeliest(width) for draft in drafts]
        self._intake.note_draft(max(map(len, drafts)))
        return drafts

    def _verify(self, rows: Sequence[Row], drafts: Sequence[Draft], logits: Tensor) -> list[Outcome]:
        """Accept, per row, the longest path of its draft that the model writes itself."""
        likeliest = most_likely(logits).tolist()  # [rows, 1 + longest draft]
        outcomes = []
        for number, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            predictions = likeliest[number][: 1 + len(draft)]
            choose = chooser(row, draft, logits, number, predictions)
            outcomes.append(verify(draft, choose, predictions))
        return outcomes

    def _commit(self, rows: Sequence[Row], drafts: Sequence[Draft], outcomes: Sequence[Outcome]) -> None:
        """Keep what was accepted, in the rows and in the cache, and tell the listeners."""
        self.stats.num_forwards += 1
        self.stats.num_row_forwards += len(rows)
        num_unread = [len(row.unread) for row in rows]
        num_new = sum(num_unread) + sum(map(len, drafts))
        self.stats.note_forward(len(rows), decode_width(num_unread, drafts), num_new)
        now = time.monotonic()
        for place, (row, count, draft, outcome) in enumerate(
            zip(rows, num_unread, drafts, outcomes, strict=True)
        ):
            taken = row.append(outcome.token_ids)
            kept = outcome.accepted[:taken]
            self._cache.commit(place, [*range(count), *(count + accepted for accepted in kept)])
            row.num_cached += count + len(kept)
            row.stats.num_prefilled += count - 1
            self.stats.num_prefilled_tokens += count - 1
            row.stats.num_forwards += 1
            row.stats.num_drafted += len(draft)
            row.stats.num_accepted += len(kept)
            row.stats.tokens_by_forward.append(taken)
            self.stats.num_tokens += taken
            if row.finish_reason is None and row.error is None:
                guarded(row, partial(row.tell, min_interval_seconds=self._stream_interval_seconds, now=now))

    def _retire(self, rows: Sequence[Row]) -> None:
        """Free the rows that have ended and tell their listeners."""
        for row in rows:
            if row.error is not None:
                self._running.remove(row)
                guarded(row, partial(row.fail, row.error))
            elif row.finish_reason is not None:
                self._running.remove(row, keep=True)
                if row.finish_reason == "stop":
                    self._intake.observe(row)
                guarded(row, partial(row.finish, row.finish_reason))

    def _fail_all(self, error: Exception) -> None:
        """After a step that failed nothing in the cache can be trusted: every row ends with the error."""
        for row in self._running.clear():
            guarded(row, partial(row.fail, error))
