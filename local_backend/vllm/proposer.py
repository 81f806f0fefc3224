"""Reference copy as a speculative proposer of vLLM: the class that ``speculative_config`` names.

::

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 32,
        "model": "local_backend.vllm.proposer.ReferenceCopyProposer"}'

Copies from the prompt, which holds retrieved documents; from ``extra_body={"vllm_xargs": {"references":
[TEXT, ...]}}`` of a request; and from earlier answers. vLLM verifies chains, so no token tree is proposed but
its likeliest path. Needs nothing of torch and nothing of this project but the drafters, so that vLLM's
environment needs this folder on ``PYTHONPATH`` alone.

Written for vLLM 0.32, whose interface for custom proposers is experimental.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from local_backend.drafting.copy_chain import CopyChain
from local_backend.drafting.draft import EMPTY_DRAFT, Outcome

# Probability with which a drafted token must be accepted: until steps were timed, and its bounds.
_FIRST_PROBABILITY, _LOWEST_PROBABILITY, _HIGHEST_PROBABILITY = 0.2, 0.04, 0.9
_MIN_TIMED_STEPS, _MEMORY = 6, 0.98
_NUM_EARLIER_ANSWERS, _MIN_ANSWER_TOKENS = 64, 8
_MAX_REFERENCE_SETS = 256


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Row:
    """One request as the drafter sees it; see :class:`~local_backend.drafting.drafter.RowView`."""

    token_ids: list[int]
    num_prompt_tokens: int
    references: Sequence[Sequence[int]]
    room: int = 0


class StepCost:
    """The acceptance probability at which a drafted token pays, from the measured time of vLLM's steps.

    One more token in a step is worth its time if it is accepted more often than the step's tokens are emitted
    in that time. On a GPU with few requests a token is nearly free; on a CPU with many it costs as much as
    it can save. A line is fitted to the steps, with less weight on older ones. The rate of emitted tokens is
    read off that line for the current number of requests, which changes faster than steps are forgotten.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        # Sums over steps: 1, tokens, their squares, seconds, seconds times tokens, emitted tokens, requests.
        self._sums = [0.0] * 7

    def add(self, num_tokens: int, seconds: float, num_emitted: int, num_requests: int) -> None:
        """One step: the tokens in it, how long it took, and what all requests together emitted."""
        self._num_steps += 1
        new = (1, num_tokens, num_tokens**2, seconds, seconds * num_tokens, num_emitted, num_requests)
        self._sums = [_MEMORY * old + each for old, each in zip(self._sums, new, strict=True)]

    def min_probability(self, num_requests: int) -> float:
        """The lowest probability of acceptance at which a token is worth its time."""
        steps, tokens, squares, seconds, products, emitted, requests = self._sums
        spread = steps * squares - tokens**2
        if self._num_steps < _MIN_TIMED_STEPS or spread < steps**2:  # a deviation of less than one token
            return _FIRST_PROBABILITY
        seconds_per_token = max(0.0, (steps * products - tokens * seconds) / spread)
        seconds_of_none = max(0.0, (seconds - seconds_per_token * tokens) / steps)
        each = num_requests / requests
        step_seconds = seconds_of_none + seconds_per_token * tokens * each
        value = seconds_per_token * emitted * each / step_seconds if step_seconds else 0.0
        return min(_HIGHEST_PROBABILITY, max(_LOWEST_PROBABILITY, value))


class ReferenceCopyProposer:
    """Proposes, for each request of a batch, the likeliest copy of what it may quote.

    That is its references or prompt, its own text, and earlier answers, which all vote for the next token.

    Args:
        vllm_config: vLLM's configuration.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._max_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_positions = int(vllm_config.model_config.max_model_len)
        self._tokenizer_name = vllm_config.model_config.tokenizer
        self._drafter = CopyChain(max_draft_tokens=self._max_draft_tokens)
        self._cost = StepCost()
        self._last_step: tuple[list[str], int, float] = ([], 0, 0.0)  # its requests, tokens and beginning
        self._rows: dict[str, _Row] = {}
        self._answers: deque[tuple[int, ...]] = deque(maxlen=_NUM_EARLIER_ANSWERS)
        # Equal references give the same object, which is indexed once.
        self._encode_references = lru_cache(maxsize=_MAX_REFERENCE_SETS)(self._encode)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Does nothing: there is no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """The proposed tokens of each request, possibly none.

        Args:
            sampled_token_ids: What each request emitted in the last step; empty while its prompt is read.
            num_tokens_no_spec: Tokens of each request, these included.
            token_ids_cpu: Prompt and emitted tokens of each request, ``[requests, positions]``.
            slot_mappings: Not used.
        """
        # vLLM gives a custom proposer neither the names of the requests nor their parameters, and refuses
        # logits processors beside speculation, which would be the other way to them: its caller has both.
        runner = sys._getframe(1).f_locals["self"]
        names = list(runner.input_batch.req_ids)
        num_sampled = [len(sampled) for sampled in sampled_token_ids]
        now = time.perf_counter()
        last_names, num_tokens, began = self._last_step
        if last_names == names and all(num_sampled):  # nothing but decoding, and no pause before it
            self._cost.add(num_tokens, now - began, sum(num_sampled), len(names))
        self._forget_all_but(runner.requests)
        self._drafter.min_probability = self._cost.min_probability(len(names))
        proposals: list[list[int]] = []
        for index, name in enumerate(names):
            draft = EMPTY_DRAFT
            if num_sampled[index]:
                token_ids = token_ids_cpu[index, : num_tokens_no_spec[index]]
                (draft,) = self._drafter.propose([self._advance(name, token_ids, runner.requests[name])])
            proposals.append(list(draft.token_ids))
        self._last_step = (names, sum(1 + len(each) for each in proposals), now)
        return proposals

    def _advance(self, name: str, token_ids: Any, request: Any) -> _Row:
        """The row of a request whose tokens are now ``token_ids``."""
        if name not in self._rows:
            self._rows[name] = self._make_row(token_ids.tolist(), request)
        row = self._rows[name]
        new = token_ids[len(row.token_ids) :].tolist()
        row.token_ids.extend(new)
        row.room = self._max_positions - len(row.token_ids)
        self._drafter.observe([row], [Outcome((), tuple(new))])
        return row

    def _make_row(self, token_ids: list[int], request: Any) -> _Row:
        num_prompt_tokens = len(request.prompt_token_ids or token_ids)
        texts = ((request.sampling_params and request.sampling_params.extra_args) or {}).get("references")
        texts = [texts] if isinstance(texts, str) else texts
        key = tuple(str(text) for text in texts if text) if isinstance(texts, Sequence) else ()
        return _Row(token_ids, num_prompt_tokens, self._encode_references(key))

    def _encode(self, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._tokenizer_name)

    def _forget_all_but(self, names: Collection[str]) -> None:
        """Drops the requests that have ended, and keeps what they have answered."""
        for name in [name for name in self._rows if name not in names]:
            row = self._rows.pop(name)
            answer = tuple(row.token_ids[row.num_prompt_tokens :])
            if len(answer) >= _MIN_ANSWER_TOKENS:
                self._answers.append(answer)
                self._drafter.earlier = tuple(self._answers)
