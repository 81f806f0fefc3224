"""What the engine returns for a row: updates, the completion and its statistics.

A completion includes log probabilities and the spans copied from references.

Knows tokens and texts. Does not know the model or the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from local_backend.caching.prefix_cache import num_shared


@dataclass(slots=True)
class EngineStats:
    """What the engine has done since it was created.

    Attributes:
        num_forwards: Decode forwards, each counted once for all its rows.
        num_prefill_forwards: Forwards that only prefill.
        num_prefilled_tokens: Prompt tokens prefilled.
        num_preempted: How often a row was preempted for lack of memory.
        num_row_forwards: Decode forwards, summed over rows.
        num_positions: Token positions of all forwards, for prompts, rows and drafts.
        num_padding: Positions without a token, because another row of the forward was wider.
        num_tokens: Tokens emitted.
    """

    num_forwards: int = 0
    num_prefill_forwards: int = 0
    num_prefilled_tokens: int = 0
    num_tokens: int = 0
    num_preempted: int = 0
    num_row_forwards: int = 0
    num_positions: int = 0
    num_padding: int = 0

    def note_forward(self, num_rows: int, width: int, num_new_tokens: int) -> None:
        """Count the positions of a forward of ``num_rows`` rows that reads ``num_new_tokens`` in all."""
        self.num_positions += num_rows * width
        self.num_padding += num_rows * width - num_new_tokens


@dataclass(frozen=True, slots=True)
class CopiedSpan:
    """Tokens that an answer and a reference share.

    Attributes:
        start: Index of the first token in the answer.
        num_tokens: How many.
        reference: Index of the reference, in the order given.
        reference_start: Index of the first token in the reference.
    """

    start: int
    num_tokens: int
    reference: int
    reference_start: int


FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(slots=True)
class Stats:
    """Statistics of one row.

    Attributes:
        num_forwards: Decode forwards of the row; prefill is not one.
        num_tokens, num_drafted, num_accepted: Tokens emitted; drafted; drafted and accepted.
        num_prefilled: Tokens prefilled for this row: of the prompt, except for a shared prefix, and of its
            own text after a preemption.
        num_preempted: How often it was preempted for lack of memory.
        tokens_by_forward: Tokens emitted by each decode forward, in order.
        submitted_seconds, first_token_seconds, finished_seconds: Times on the ``time.monotonic`` clock.
    """

    num_forwards: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_prefilled: int = 0
    num_preempted: int = 0
    tokens_by_forward: list[int] = field(default_factory=list)
    submitted_seconds: float = 0.0
    first_token_seconds: float | None = None
    finished_seconds: float | None = None

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens per decode forward, bonus tokens included."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that were accepted; ``None`` if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely an emitted token was.

    Attributes:
        logprob: Natural logarithm of its probability under the model.
        top: The most likely tokens in its stead and their log probabilities, likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprob(logits: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Look up ``token_id`` and the ``num_top`` likeliest tokens in ``logits`` ``[vocabulary]``."""
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(num_top, logprobs.numel()))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished row.

    Attributes:
        token_ids: What was generated, the end token included when it was generated.
        text: Its text, without special tokens, cut before a stop string.
        finish_reason: ``"stop"`` (end token or stop string), ``"length"`` or ``"cancelled"``.
        logprobs: How likely each of ``token_ids`` was; ``None`` unless requested.
        references: Token ids of the texts that could be copied.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: Stats
    num_prompt_tokens: int
    logprobs: list[TokenLogprob] | None = None
    references: Sequence[Sequence[int]] = field(default=(), repr=False)

    def copied_spans(self, min_tokens: int = 8) -> tuple[CopiedSpan, ...]:
        """The spans of at least ``min_tokens`` tokens that occur in a reference, in order, without overlap.

        Takes, from left to right, the longest span that begins at each token; the first reference wins ties.

        Raises:
            ValueError: ``min_tokens`` is below 1.
        """
        if min_tokens < 1:
            raise ValueError(f"min_tokens must be at least 1, got {min_tokens}")
        answer = tuple(self.token_ids)
        wanted = {answer[start : start + min_tokens] for start in range(len(answer) - min_tokens + 1)}
        found: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for number, reference in enumerate(map(tuple, self.references)):
            for start in range(len(reference) - min_tokens + 1):
                if (key := reference[start : start + min_tokens]) in wanted:
                    found[key].append((number, start))
        spans: list[CopiedSpan] = []
        start = 0
        while start <= len(answer) - min_tokens:
            here = [
                CopiedSpan(start, num_shared(answer[start:], self.references[number][begin:]), number, begin)
                for number, begin in found.get(answer[start : start + min_tokens], ())
            ]
            if here:
                spans.append(max(here, key=lambda span: span.num_tokens))
            start += spans[-1].num_tokens if here else 1
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class Update:
    """A streamed update of a row: new text, and finally the completion or the error that ended it.

    Attributes:
        text: Text that became final since the last update.
        token_ids: Tokens emitted since the last update; their text may follow later.
        completion: The finished row.
        error: The error that ended the row instead.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    completion: Completion | None = None
    error: BaseException | None = None

    @property
    def is_last(self) -> bool:
        """Whether this is the row's last update."""
        return self.completion is not None or self.error is not None
