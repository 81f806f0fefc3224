"""How a row's tokens are chosen: sampling parameters, and logits to probabilities.

Knows logits of single positions. Does not know drafts, rows or the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

_LEAST_TEMPERATURE = 1e-30  # in a calculation
# Of each number: its kind, its least and greatest value, and these in words.
_BOUNDS: dict[str, tuple[Any, float, float, str]] = {
    "max_tokens": (Integral, 1, math.inf, "at least 1"),
    "min_tokens": (Integral, 0, math.inf, "0 or more"),
    "temperature": (Real, 0, math.inf, "0 (greedy) or more"),
    "top_p": (Real, math.nextafter(0, 1), 1, "above 0 and at most 1"),
    "top_k": (Integral, 0, math.inf, "0 (all tokens) or more"),
    "min_p": (Real, 0, math.nextafter(1, 0), "0 (all tokens) or more, below 1"),
    "presence_penalty": (Real, -2, 2, "from -2 to 2"),
    "frequency_penalty": (Real, -2, 2, "from -2 to 2"),
    "seed": (Integral, -(2**63), 2**64 - 1, "a whole number of 64 bits"),
    "logprobs": (Integral, 0, math.inf, "None or the number of alternatives"),
}
_OPTIONAL = ("max_tokens", "seed", "logprobs")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one completion are chosen.

    ``do_sample``, ``temperature``, ``top_p``, ``top_k``, lengths and the like of a model's
    ``generation_config`` are ignored. Its end tokens, stop strings and logits processors apply in addition.

    Attributes:
        max_tokens: Maximum number of tokens; ``None`` is as many as the model has positions for.
        min_tokens: Until the answer has this many tokens, no token ends it: none of the end tokens, and none
            that contains a stop string. A stop string of several tokens still does.
        temperature: 0 is greedy: always the most likely token.
        top_p: Sample among the most likely tokens that together have this probability.
        top_k: Sample among this many most likely tokens; 0 is all tokens.
        min_p: Sample among tokens with at least this fraction of the highest probability; 0 is all tokens.
        presence_penalty: Subtracted from the logits of tokens that the answer has, as in OpenAI's API.
        frequency_penalty: Subtracted once for each time that the answer has the token.
        seed: The same seed gives the same text; ``None`` draws one.
        stop: Stop strings; the text ends before the first one.
        stop_token_ids: Further end tokens besides the model's own.
        ignore_end: Continue past the model's end tokens, up to ``max_tokens``.
        logprobs: Report the log probability of each emitted token and of this many most likely ones, before
            logits processors and temperature; ``None`` reports nothing.
        logits_processors: Applied after the model's own and the engine's. Each is called with token ids
            ``[1, tokens]`` and scores ``[1, vocabulary]``, on the engine's thread, and must be a pure
            function of its arguments.
        grammar: What the text must follow, e.g. :func:`~local_backend.sequences.grammar.json_grammar` of a
            schema. Applied after the logits processors; where they rule out all that it allows, it wins.
        keep_special_tokens: Whether special tokens that the model writes are part of the text.

    Raises:
        TypeError: A value is no number.
        ValueError: A value lies outside its range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    min_p: float = 0.0
    logprobs: int | None = None
    logits_processors: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    grammar: str | None = None
    keep_special_tokens: bool = False

    def __post_init__(self) -> None:
        for name, (kind, least, most, words) in _BOUNDS.items():
            value: Any = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be {words}, got {value!r}")
            if not least <= value <= most:
                raise ValueError(f"{name} must be {words}, got {value}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be a tuple of non-empty strings, got {self.stop!r}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Float32 distribution a row samples from, of one position; filters in the order of ``transformers``."""
    scores = logits.float()
    # In relation to the highest score: near a temperature of 0 others overflow.
    scores = (scores - scores.max()) / max(params.temperature, _LEAST_TEMPERATURE)
    if 0 < params.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        ordered, order = scores.sort(descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        scores = scores.index_fill(0, order[mass_before >= params.top_p], -torch.inf)
    probability = scores.softmax(-1)
    if params.min_p > 0:
        probability = probability.where(probability >= params.min_p * probability.max(), 0)
        probability = probability / probability.sum()
    return probability


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """Draw one token from ``logits`` ``[vocabulary]``, with one uniform number from ``generator``.

    The number is looked up in the cumulative distribution in double precision, so the result does not
    depend on what else is in the batch.

    Raises:
        ValueError: No token can be drawn, because the scores hold NaN or rule out every token.
    """
    cumulated = probabilities(logits, params).double().cumsum(-1)
    if not cumulated[-1] > 0:
        raise ValueError("no token can be sampled: the scores hold NaN or rule out every token")
    uniform = torch.rand((), generator=generator, dtype=torch.float64) * cumulated[-1].cpu()
    token = torch.searchsorted(cumulated, uniform.to(cumulated.device), right=True)
    return min(int(token), cumulated.numel() - 1)
