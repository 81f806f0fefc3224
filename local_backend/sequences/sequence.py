"""One request's row: its tokens, how many of them are cached, and its listener.

Knows nothing of the model, the cache or drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from local_backend.sequences.detokenizing import Detokenizer
from local_backend.sequences.grammar import GrammarRule
from local_backend.sequences.logits import RowLogits, TokenBiases
from local_backend.sequences.outputs import Completion, FinishReason, Stats, TokenLogprob, Update
from local_backend.sequences.sampling import SamplingParams
from local_backend.sequences.spans import end_span

STREAM_INTERVAL_SECONDS = 0.02
_UNIFORMS_AT_ONCE = 64


class State(Enum):
    """State of a row: WAITING for a slot, PREFILLING its prompt, WRITING (decoding), FINISHED."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    WRITING = "writing"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Row:
    """One request in the engine.

    Attributes:
        references: Texts that may be copied, as token ids.
        token_ids: Prompt and all emitted tokens.
        num_cached: How many of ``token_ids`` have their keys and values in the cache.
        max_length: Maximum length of ``token_ids``.
        min_interval_seconds: Minimum time between two updates before the last one.
        logits: Its logits processors, if there are any.
        biases: What it adds to the scores of single tokens, if anything.
        grammar: What its answer must follow, if anything.
        error: The error that ends the row at the end of the step.
        logprobs: One for each emitted token, if requested.
        span: Of a tracer, see :mod:`~local_backend.sequences.spans`; ends with the row.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    end_token_ids: frozenset[int]
    max_length: int
    detokenizer: Detokenizer
    listener: Callable[[Update], None]
    references: tuple[tuple[int, ...], ...] = ()
    logits: RowLogits | None = None
    biases: TokenBiases | None = None
    grammar: GrammarRule | None = None
    state: State = State.WAITING
    token_ids: list[int] = field(init=False)
    num_cached: int = 0
    min_interval_seconds: float = STREAM_INTERVAL_SECONDS
    stats: Stats = field(default_factory=Stats)
    finish_reason: FinishReason | None = None
    cancelled: bool = False
    error: Exception | None = None
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    span: Any = None
    _generator: torch.Generator | None = None
    _uniforms: list[float] = field(default_factory=list)
    _undecoded: list[int] = field(default_factory=list)
    _num_sent: int = 0
    _num_sent_tokens: int = 0
    _sent_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.stats.submitted_seconds = time.monotonic()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_to_prefill(self) -> int:
        """Tokens left to prefill: all that are not cached but the last, which the decode forward reads."""
        return max(0, len(self.token_ids) - 1 - self.num_cached)

    @property
    def unread(self) -> list[int]:
        """The tokens that are not cached: the last, and possibly others before the first decode forward."""
        return self.token_ids[self.num_cached :]

    @property
    def room(self) -> int:
        """How many more tokens the row may emit."""
        return self.max_length - len(self.token_ids)

    @property
    def takes_most_likely(self) -> bool:
        """Whether decoding is plain greedy, by the model's own scores."""
        return self.params.is_greedy and self.logits is None and self.biases is None and self.grammar is None

    @property
    def forced(self) -> list[int]:
        """The tokens of what the row's grammar says must follow."""
        return [] if self.grammar is None else self.grammar.forced(self.token_ids[self.num_prompt_tokens :])

    def uniform(self, place: int) -> float:
        """The row's own random number from 0 to below 1 for the token at ``place`` in its answer."""
        if self._generator is None:
            self._generator = torch.Generator()
            if self.params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(int(self.params.seed))
        while place >= len(self._uniforms):
            drawn = torch.rand(_UNIFORMS_AT_ONCE, generator=self._generator, dtype=torch.float64)
            self._uniforms += drawn.tolist()
        return self._uniforms[place]

    def append(self, token_ids: Sequence[int]) -> int:
        """Append emitted tokens until the row ends; returns how many were appended.

        Sets ``finish_reason`` at an end token, a stop string, or the last token there is room for. An
        exception while detokenizing is stored in ``error``.
        """
        taken = 0
        for token in token_ids:
            self.token_ids.append(token)
            self._undecoded.append(token)
            taken += 1
            if token in self.end_token_ids or self._reaches_stop():
                self.finish_reason = "stop"
            if self.finish_reason is None and self.room <= 0:
                self.finish_reason = "length"
            if self.finish_reason is not None or self.error is not None:
                break
        self.stats.num_tokens += taken
        return taken

    def _reaches_stop(self) -> bool:
        if not self.detokenizer.stops.stop:
            return False
        try:
            self._detokenize()
        except Exception as error:
            self.error = error
        return self.detokenizer.stops.is_reached

    def _detokenize(self) -> None:
        self.text += self.detokenizer.push(self._undecoded)
        self._undecoded.clear()

    def _update(self, completion: Completion | None = None) -> Update:
        """Text and tokens since the last call."""
        text, self._num_sent = self.text[self._num_sent :], len(self.text)
        first = self.num_prompt_tokens + self._num_sent_tokens
        token_ids = tuple(self.token_ids[first:])
        self._num_sent_tokens += len(token_ids)
        return Update(text, token_ids, completion)

    def emit(self, *, now: float) -> None:
        """Send new text to the listener, at most once per ``min_interval_seconds``."""
        if self.stats.first_token_seconds is None:
            self.stats.first_token_seconds = now
        elif now - self._sent_seconds < self.min_interval_seconds:
            return
        self._detokenize()
        self._sent_seconds = now
        self.listener(self._update())

    def finish(self, reason: FinishReason) -> None:
        """Send the rest of the text and the completion to the listener."""
        if self.state is State.FINISHED:
            return
        self._detokenize()
        self.text += self.detokenizer.finish()
        self._end(reason)
        completion = Completion(
            self.token_ids[self.num_prompt_tokens :],
            self.text,
            reason,
            self.stats,
            self.num_prompt_tokens,
            # Drop those of tokens beyond the row's end.
            self.logprobs[: self.stats.num_tokens] if self.params.logprobs is not None else None,
            self.references,
        )
        self.listener(self._update(completion))

    def fail(self, error: BaseException) -> None:
        """End the row and send the error to its listener."""
        if self.state is State.FINISHED:
            return
        self._end(type(error).__name__)
        self.listener(Update(error=error))

    def _end(self, reason: str) -> None:
        self.state = State.FINISHED
        self.stats.finished_seconds = time.monotonic()
        if self.span is not None:
            end_span(self.span, self.stats, reason)


def notify_safely(row: Row, emit: Callable[[], None]) -> None:
    """Run ``emit``; an exception ends only this row and is sent to its listener."""
    try:
        emit()
    except Exception as error:  # a listener is the caller's code and may raise anything
        row.cancelled = True
        row.state = State.FINISHED
        try:
            row.listener(Update(error=error))
        except Exception:  # the listener itself is gone, e.g. its event loop is closed: nobody to tell
            return
