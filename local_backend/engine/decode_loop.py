"""The decoding loop: draft -> verify -> accept -> commit, for every row of the batch at once.

:meth:`DecodeLoop.step` is the loop's body and names its phases in order; it has no branch on the drafter.
Knows rows, drafts and forwards. Does not know how requests are submitted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
from torch import Tensor

from local_backend.caching.cache_layer import explained
from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.drafting import Drafter
from local_backend.drafting.draft import EMPTY_DRAFT, Draft, Outcome
from local_backend.engine.choosing import choose_tokens, most_likely
from local_backend.engine.verification import verify
from local_backend.kernels.openmp import ThreadChoice
from local_backend.models.architecture import Architecture
from local_backend.models.forward_cost import ForwardCost
from local_backend.models.runner import ModelRunner, decode_width, widest_within
from local_backend.scheduling.running_batch import RunningBatch
from local_backend.scheduling.scheduler import Scheduler
from local_backend.sequences.outputs import EngineStats, token_logprob
from local_backend.sequences.sequence import Row, notify_safely

# Merge the last prefill with the first decode only if it wastes at most this many columns: padding of shorter
# prompts and, if the model cannot skip their logits, all prompt columns.
_MAX_IDLE_COLUMNS, _FEW_ROWS = 32, 8  # a wider forward of few rows costs next to nothing
_WARM_UP_TOKENS = (16, 1)  # a short prompt, and a decode forward
_COMMON_ROWS, _COMMON_LENGTHS = (1, 2, 4, 8, 16), (0, 256, 512, 768)


@dataclass(eq=False, kw_only=True)
class DecodeLoop:
    """Decodes the rows of one batch. One thread at a time calls :meth:`step`.

    ``width_costs`` is called when a draft has probabilities; at most ``prefill_chunk_tokens`` of prompts are
    prefilled between two decode forwards.
    """

    forward: ModelRunner
    cache: RaggedKVCache
    batch: RunningBatch
    scheduler: Scheduler
    drafter: Drafter
    stats: EngineStats
    width_costs: Callable[[], ForwardCost]
    architecture: Architecture
    vocabulary_size: int
    prefill_chunk_tokens: int
    _errands: deque[tuple[Callable[[], object], Future[None]]] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self._threads = ThreadChoice(torch.get_num_threads() if self.architecture.device.type == "cpu" else 1)

    def before_next_step(self, errand: Callable[[], object]) -> Future[None]:
        """Run ``errand`` on the loop's thread before the next step; from any thread."""
        done: Future[None] = Future()
        self._errands.append((errand, done))
        return done

    def warm_up(self) -> None:
        """Run forwards of no row, on the loop's thread: the first ones of a thread are slow."""
        if self.batch:
            return
        try:
            self.cache.add_row()
            for num_tokens in _WARM_UP_TOKENS:
                token_ids = [0] * min(num_tokens, self.architecture.max_positions)
                logits = self.forward(0, [token_ids], [EMPTY_DRAFT])
                assert logits is not None
                most_likely(logits)
            self._record_common_shapes()
        finally:
            while self.cache.lengths:
                self.cache.remove_last_row()

    def _record_common_shapes(self) -> None:
        """Record the graphs of few rows and short contexts, which most answers need; others on first use."""
        for num_rows, length in product(_COMMON_ROWS, _COMMON_LENGTHS) if self.forward.graphed else ():
            fits = self.cache.fits(num_rows, length + 1) and length < self.architecture.max_positions
            if num_rows <= self.batch.max_rows and fits:
                self.cache.assume_length(0)
                while len(self.cache.lengths) < num_rows:
                    self.cache.add_row()
                self.cache.assume_length(length)
                self.forward(0, [[0]] * num_rows, [EMPTY_DRAFT] * num_rows)

    @torch.inference_mode()
    def step(self) -> bool:
        """Admit, prefill a chunk, preempt, then run one forward for all decoding rows.

        If no row is decoding yet, that forward may also prefill the end of the prompts.

        Returns:
            Whether rows are left.
        """
        try:
            self._run_errands()
            self.scheduler.receive()
            self.scheduler.admit()
            self._prefill()
            self.scheduler.preempt()
            if rows := self.batch.writing:
                drafts = self._propose(rows)
                unread = [row.unread for row in rows]
                kind = (len(rows), decode_width([*map(len, unread)], drafts))
                forward = partial(self.forward, 0, unread, drafts, num_shared=self.batch.num_shared)
                logits = self._threads.run(kind, forward)
                assert logits is not None
                outcomes = self._verify(rows, drafts, logits)
                self._commit(rows, drafts, outcomes)
                self.drafter.observe(rows, outcomes)
                self._retire(rows)
        except Exception as error:  # after a failed step the cache cannot be trusted
            told = explained(
                error, f"a forward of {len(self.batch)} rows: lower max_rows or prefill_chunk_tokens"
            )
            for row in self.batch.clear():
                notify_safely(row, partial(row.fail, told))
        return bool(self.batch or self.scheduler)

    def _run_errands(self) -> None:
        while self._errands:
            errand, done = self._errands.popleft()
            try:
                errand()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def _prefill(self) -> None:
        """Prefill one chunk of every prompt that is not yet in the cache."""
        rows = self.batch.prefilling
        if not rows:
            return
        first_slot = len(self.batch.writing)
        num_left = [row.num_to_prefill for row in rows]
        room = self.cache.most_new_tokens(first_slot, len(rows))
        num_new = min(max(num_left), max(1, self.prefill_chunk_tokens // len(rows)), room)
        # Saves a forward, if no row is decoding that would have to wait and few columns are wasted.
        is_last = first_slot == 0 and max(num_left) <= num_new < room
        # Unless the model can keep the last logits only, a merged forward computes those of all columns.
        num_idle = max(num_left) - (min(num_left) if self.architecture.keeps_logits else 0)
        if is_last and num_idle <= _MAX_IDLE_COLUMNS:
            self.batch.begin_writing(most_unread=num_new)
            return
        chunks = [
            row.token_ids[row.num_cached : row.num_cached + min(num_new, row.num_to_prefill)] for row in rows
        ]
        self.forward(first_slot, chunks, [EMPTY_DRAFT] * len(rows), with_logits=False)
        self.stats.num_prefill_forwards += 1
        self.stats.note_forward(len(rows), max(map(len, chunks)), sum(map(len, chunks)))
        for slot, (row, chunk) in enumerate(zip(rows, chunks, strict=True), first_slot):
            self.cache.commit(slot, range(len(chunk)))
            row.num_cached += len(chunk)
            row.stats.num_prefilled += len(chunk)
            self.stats.num_prefilled_tokens += len(chunk)
        self.batch.begin_writing()

    def _propose(self, rows: Sequence[Row]) -> list[Draft]:
        """The drafter's drafts, cut to what the model can read, the row can emit, fits and pays."""
        num_unread = max(len(row.unread) for row in rows)
        widest = widest_within(self.cache.most_new_tokens(0, len(rows)) - num_unread + 1)
        drafts = [
            (Draft.chain(forced) if len(rows) <= _FEW_ROWS and (forced := row.forced) else draft)
            .within_vocabulary(self.vocabulary_size)
            .ending_with(row.end_token_ids)
            .truncated(max_tokens=widest - 1, max_depth=row.room - 1)
            for row, draft in zip(rows, self.drafter.propose(rows), strict=True)
        ]
        if num_unread > 1:  # a chain needs no mask, with which reading a prompt takes longer
            drafts = [draft.likeliest_chain() for draft in drafts]
        if any(draft.probabilities for draft in drafts):
            width = self.width_costs().best_draft_width(
                drafts, context=max(len(row.token_ids) for row in rows)
            )
            drafts = [draft.likeliest(width) for draft in drafts]
        self.scheduler.note_draft(max(map(len, drafts)))
        return drafts

    def _verify(self, rows: Sequence[Row], drafts: Sequence[Draft], logits: Tensor) -> list[Outcome]:
        """Accept, per row, the longest path of its draft that the model itself would write."""
        chosen = choose_tokens(rows, drafts, logits, ahead=logits.device.type != "cpu")
        outcomes = []
        for row, row_logits, draft, tokens in zip(rows, logits, drafts, chosen, strict=True):
            outcome = verify(draft, predictions=tokens)
            outcomes.append(outcome)
            if row.params.logprobs is not None:
                nodes = (-1, *outcome.accepted)
                row.logprobs += [
                    token_logprob(row_logits[node + 1], token, row.params.logprobs)
                    for node, token in zip(nodes, outcome.token_ids, strict=True)
                ]
        return outcomes

    def _commit(self, rows: Sequence[Row], drafts: Sequence[Draft], outcomes: Sequence[Outcome]) -> None:
        """Keep accepted tokens in the rows and the cache, and notify the listeners."""
        self.stats.num_forwards += 1
        self.stats.num_row_forwards += len(rows)
        num_unread = [len(row.unread) for row in rows]
        num_new = sum(num_unread) + sum(map(len, drafts))
        self.stats.note_forward(len(rows), decode_width(num_unread, drafts), num_new)
        now = time.monotonic()
        for slot, (row, count, draft, outcome) in enumerate(
            zip(rows, num_unread, drafts, outcomes, strict=True)
        ):
            taken = row.append(outcome.token_ids)
            kept = outcome.accepted[:taken]
            self.cache.commit(slot, [*range(count), *(count + accepted for accepted in kept)])
            row.num_cached += count + len(kept)
            row.stats.num_prefilled += count - 1
            self.stats.num_prefilled_tokens += count - 1
            row.stats.num_forwards += 1
            row.stats.num_drafted += len(draft)
            row.stats.num_accepted += len(kept)
            row.stats.tokens_by_forward.append(taken)
            self.stats.num_tokens += taken
            if row.finish_reason is None and row.error is None:
                notify_safely(row, partial(row.emit, now=now))

    def _retire(self, rows: Sequence[Row]) -> None:
        """Free the slots of finished rows and notify their listeners."""
        for row in rows:
            if row.error is not None:
                self.batch.remove(row)
                notify_safely(row, partial(row.fail, row.error))
            elif row.finish_reason is not None:
                self.batch.remove(row, keep=True)
                if row.finish_reason == "stop":
                    self.scheduler.observe(row)
                notify_safely(row, partial(row.finish, row.finish_reason))
