"""How a row's tokens are chosen: sampling parameters, and logits to probabilities.

Knows logits of single positions, any number of them at once. Does not know drafts, rows or the model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

_LEAST_TEMPERATURE, _LOW_TEMPERATURE = 1e-30, 1e-3  # in a calculation
_BLOCK, _CACHED = 256, 2**17  # tokens
_BELOW_ONE = 1 - 2**-40
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
    def is_filtered(self) -> bool:
        """Whether only some of the tokens may be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Float32 distribution a row samples from, of one position; filters in the order of ``transformers``."""
    weights, _ = _weights(logits[None].float().clone(), [params])
    return _filtered(weights, [params])[0]


def sample(scores: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Draw a token at each of several positions, each by its parameters and its uniform number.

    The number is looked up in the cumulative distribution in double precision and in the order of ids, so the
    result does not depend on what else is in the batch.

    Args:
        scores: ``[positions, vocabulary]``, float32; overwritten.
        params: One for each position, with a temperature above 0.
        uniforms: One for each position, from 0 to below 1.

    Returns:
        Token ids ``[positions]`` on the device of ``scores``; -1 where no token can be drawn, because the
        scores hold NaN or rule out every token.
    """
    weights, sums = _weights(scores, params)
    if scores.device.type == "cpu":
        return _look_up_and_refuse(weights, sums, params, uniforms)
    if any(one.is_filtered for one in params):
        return _look_up(_filtered(weights, params), uniforms)
    return _look_up(weights, uniforms, sums)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device, dtype=like.dtype)[:, None]


def _weights(scores: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Probabilities at each temperature, in place of ``scores``, and the sums of their blocks."""
    temperatures = [max(one.temperature, _LEAST_TEMPERATURE) for one in params]
    if min(temperatures) < _LOW_TEMPERATURE:
        scores -= scores.amax(-1, keepdim=True)  # others would overflow
    factors = 1 / _column(temperatures, scores)
    sums = scores.new_empty(len(scores), -(-scores.shape[-1] // _BLOCK))
    # On a CPU, few positions at once: the next operation finds them in the processor's cache.
    count = max(1, _CACHED // scores.shape[-1]) if scores.device.type == "cpu" else len(scores)
    for part, factor, of_part in zip(
        scores.split(count), factors.split(count), sums.split(count), strict=True
    ):
        torch.softmax(part.mul_(factor), -1, out=part)
        torch.sum(_blocks(part), -1, out=of_part)
    return scores, sums


def _filtered(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities of the tokens that ``top_k``, then ``top_p`` and then ``min_p`` leave; 0 for others."""
    counts = [one.top_k if one.top_k < weights.shape[-1] else 0 for one in params]
    if any(counts):
        place = (_column(counts, weights).long() - 1).clamp(min=0)
        least = weights.topk(max(counts)).values.gather(1, place)
        weights = weights.masked_fill((weights < least) & (_column(counts, weights) > 0), 0)
    if any(one.top_p < 1 for one in params):
        ordered, order = weights.sort(descending=True, stable=True)
        cumulated = ordered.double().cumsum(-1)
        mass = _column([one.top_p for one in params], cumulated) * cumulated[:, -1:]
        weights = weights.scatter(1, order, ordered.masked_fill(cumulated - ordered >= mass, 0))
    shares = _column([one.min_p for one in params], weights)
    weights = weights.masked_fill(weights < shares * weights.amax(-1, keepdim=True), 0)
    return weights / weights.sum(-1, keepdim=True)


def _blocks(weights: Tensor) -> Tensor:
    """``[positions, blocks, tokens of a block]``; the last block may be filled up with zeros."""
    num_missing = -weights.shape[-1] % _BLOCK
    return (pad(weights, (0, num_missing)) if num_missing else weights).view(len(weights), -1, _BLOCK)


def _look_up(weights: Tensor, uniforms: Sequence[float], sums: Tensor | None = None) -> Tensor:
    """The token at each share of the cumulated weights: first its block, then the token in the block."""
    blocks = _blocks(weights)
    ends = (blocks.sum(-1) if sums is None else sums).double().cumsum(-1)  # [positions, blocks]
    total = ends[:, -1:]
    target = _column(uniforms, ends) * _BELOW_ONE * total
    block = torch.searchsorted(ends, target, right=True).clamp_(max=blocks.shape[1] - 1)
    inside = blocks[torch.arange(len(blocks), device=weights.device), block[:, 0]].double().cumsum(-1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0)
    # Both sums round: what is looked up must lie within the block.
    rest = (target - before).clamp_(min=0).minimum(inside[:, -1:] * _BELOW_ONE)
    token = block * _BLOCK + torch.searchsorted(inside, rest, right=True)
    return torch.where(total > 0, token, -1)[:, 0]


def _look_up_and_refuse(
    weights: Tensor, sums: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> Tensor:
    """A token of those that the filters leave; overwrites ``weights``.

    Sorting takes ten times as long as all the rest on a CPU. So a token that a filter leaves out is refused,
    and another is looked up among those before it: what is taken has the same distribution.
    """
    draws = {
        number: _Draw.of(each, one, uniform)
        for number, (each, one, uniform) in enumerate(zip(weights.numpy(), params, uniforms, strict=True))
        if one.is_filtered
    }
    tokens = _look_up(weights, uniforms, None if any(one.top_k for one in params) else sums)
    while True:
        drawn = tokens.tolist()
        draws = {number: draw for number, draw in draws.items() if draw.refuses(drawn[number])}
        if not draws:
            return tokens
        tokens[[*draws]] = _look_up(weights[[*draws]], [draw.next_uniform() for draw in draws.values()])


@dataclass(slots=True)
class _Draw:
    """What may be drawn at one position."""

    weights: NDArray[np.float32]
    total: float  # weight of the tokens that ``top_k`` leaves
    mass: float  # part of it that the tokens before an accepted one do not have
    least: float  # weight that ``top_k`` and ``min_p`` leave
    uniform: float
    more: random.Random | None = None

    @classmethod
    def of(cls, weights: NDArray[np.float32], params: SamplingParams, uniform: float) -> _Draw:
        """The draws from ``weights``, which are 1 in sum; those that ``top_k`` leaves out become 0."""
        least, total, size = 0.0, 1.0, len(weights)
        if 0 < params.top_k < size:
            least = float(np.partition(weights, size - params.top_k)[size - params.top_k])
            total = float(np.multiply(weights, weights >= least, out=weights).sum())
        mass = params.top_p * total if params.top_p < 1 else math.inf
        if params.min_p:
            least = max(least, params.min_p * float(weights.max()))
        return cls(weights, total, mass, least, uniform)

    def refuses(self, token: int) -> bool:
        """Whether a filter leaves ``token`` out; if so, it and those after it get no weight."""
        weights, weight = self.weights, float(self.weights[token])
        if token < 0 or (
            weight >= self.least and self.total - weight < self.mass
        ):  # no token, or no need to sum
            return False
        if weight >= self.least:
            before = np.dot(weights, weights > weight) + weight * np.count_nonzero(weights[:token] == weight)
            if before < self.mass:
                return False
            weights[token:] *= weights[token:] != weight
        np.multiply(weights, weights >= max(weight, self.least), out=weights)
        return True

    def next_uniform(self) -> float:
        """Derived from the first one."""
        self.more = self.more or random.Random(self.uniform)
        return self.more.random()
