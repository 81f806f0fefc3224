"""How a row's tokens are chosen: sampling parameters, and logits to probabilities.

Knows logits of single positions, any number of them at once. Does not know drafts, rows or the model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray as Array
from torch import Tensor
from torch.nn.functional import pad

from local_backend.drafting import make_drafter

_COLDEST, _BELOW_ONE = 1e-30, 1 - 2**-40  # in calculations
_READ_AT_ONCE = ("cpu",)  # devices whose values can be read without waiting for them
_BLOCK, _LEAST_BLOCK, _NUM_PARTS = 256, 32, 3  # tokens, and parts of a vocabulary
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
        drafter: The name of a drafter, e.g. ``"none"``, in place of the engine's; changes no token.

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
    drafter: str | None = None

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
        make_drafter(self.drafter or "none")  # raises if there is none of that name

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
    return _filtered(_weights(logits[None].float().clone(), [params]), [params])[0]


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
    if scores.device.type not in _READ_AT_ONCE:
        return _look_up_sorted(scores, params, uniforms)
    tokens = torch.empty(len(params), dtype=torch.long)
    for is_few, look_up in ((True, _look_up_among_few), (False, _look_up_refusing)):
        rows = [number for number, one in enumerate(params) if (0 < one.top_k < scores.shape[1]) == is_few]
        if len(rows) == len(params):
            return look_up(scores, params, uniforms)
        if rows:
            chosen = [params[row] for row in rows], [uniforms[row] for row in rows]
            tokens[rows] = look_up(scores[rows], *chosen)
    return tokens


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device, dtype=like.dtype)[:, None]


def _weights(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities at each temperature times a number of the row's own, in place of ``scores``."""
    scores -= scores.amax(-1, keepdim=True)
    factors = [math.log2(math.e) / max(one.temperature, _COLDEST) for one in params]
    return scores.mul_(_column(factors, scores)).exp2_()


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


def _blocks(values: Tensor, fill: float = 0) -> Tensor:
    """``[positions, blocks, tokens of a block]``; the last block may be filled up."""
    size = math.gcd(values.shape[-1], _BLOCK)
    if size < _LEAST_BLOCK:
        size, values = _BLOCK, pad(values, (0, -values.shape[-1] % _BLOCK), value=fill)
    return values.view(len(values), -1, size)


def _look_up(library: Any, blocks: Any, sums: Any, uniforms: Sequence[float]) -> Any:
    """The token at each share of the cumulated weights: first its block, then the token in the block.

    Of tensors by torch, and of arrays by numpy, whose small operations take a fifth of the time on a CPU.
    """
    place = {"device": blocks.device}  # numpy's arrays have one, too
    ends = library.cumsum(sums, -1, dtype=library.float64)  # [positions, blocks]
    total = ends[:, -1]
    target = library.asarray(uniforms, dtype=library.float64, **place) * total * _BELOW_ONE
    block = (ends[:, :-1] <= target[:, None]).sum(-1)
    each = library.arange(len(block), **place)
    inside = library.cumsum(blocks[each, block], -1, dtype=library.float64)
    # Both sums round: what is looked up must lie within the block.
    rest = target - ends[each, block - 1] * (block > 0)
    rest = library.minimum(rest, inside[:, -1] * _BELOW_ONE)
    token = block * blocks.shape[-1] + (inside <= rest[:, None]).sum(-1)
    return library.where(total > 0, token, -1)


def _look_up_sorted(scores: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """A token of those that the filters leave; overwrites ``scores``."""
    weights = _weights(scores, params)
    blocks = _blocks(_filtered(weights, params) if any(one.is_filtered for one in params) else weights)
    return cast("Tensor", _look_up(torch, blocks, blocks.sum(-1), uniforms))


def _look_up_among_few(scores: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """A token of those that are left, all at least the last of the ``top_k`` largest (of peaks of blocks)."""
    peaks = _blocks(scores, -math.inf).amax(-1).sort(descending=True).values
    num_peaks = peaks.shape[1]
    least = peaks.gather(1, _column([min(one.top_k, num_peaks) - 1 for one in params], scores).long())
    for row, count in enumerate(one.top_k for one in params):
        if count > num_peaks:
            least[row] = float(np.partition(scores[row].numpy(), -count)[-count])
    # What is ruled out is none of them, and no score reaches NaN.
    least = least.clamp(min=torch.finfo(least.dtype).min) + 0 * peaks[:, :1]
    rows, ids = np.divmod(np.flatnonzero(scores.numpy() >= least.numpy()), scores.shape[1])
    places = np.arange(len(ids)) - np.searchsorted(rows, rows)
    # In double precision the number of candidates of other rows cannot change what a row draws.
    few = scores.new_full((len(params), int(places.max(initial=0)) + 1), -math.inf, dtype=torch.float64)
    tokens = torch.zeros(few.shape, dtype=torch.long)
    few[rows, places], tokens[rows, places] = scores[rows, ids].double(), torch.from_numpy(ids)
    index = _look_up_sorted(few, params, uniforms)
    return tokens.gather(1, index.clamp(min=0)[:, None])[:, 0].where(index >= 0, -1)


def _look_up_refusing(scores: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """A token of those that ``top_p``, then ``min_p`` leave; overwrites ``scores``.

    Sorting takes ten times as long as all the rest on a CPU. So a token that a filter leaves out is refused,
    and another is looked up among those before it: what is taken has the same distribution.
    """
    blocks = _blocks(_weights(scores, params))
    sums = blocks.sum(-1).numpy()
    weights = blocks.numpy()
    tokens: list[int] = _look_up(np, weights, sums, uniforms).tolist()
    for row, (one, token) in enumerate(zip(params, tokens, strict=True)):
        if token >= 0 and (one.top_p < 1 or one.min_p > 0):
            tokens[row] = _first_left(weights[row], float(sums[row].sum()), token, one, uniforms[row])
    return torch.tensor(tokens)


def _first_left(blocks: Array[Any], total: float, token: int, params: SamplingParams, uniform: float) -> int:
    """The first of ``token`` and others drawn instead that the filters leave; overwrites ``blocks``."""
    weights = blocks.reshape(-1)
    mass, least = params.top_p * total, params.min_p * weights.max() if params.min_p else 0.0
    while not _is_left(weights, total, token, mass, least):
        weight = weights[token]
        weights[token:] *= weights[token:] != weight
        weights *= weights >= max(weight, least)
        sums, uniform = blocks.sum(-1), random.Random(uniform).random()
        if not (total := float(sums.sum())):
            return token  # the heaviest: sums round
        token = int(_look_up(np, blocks[None], sums[None], [uniform])[0])
    return token


def _is_left(weights: Array[Any], total: float, token: int, mass: float, least: float) -> bool:
    """Whether ``token`` weighs ``least`` or more and those before it, by weight, less than ``mass``."""
    weight = float(weights[token])
    before, size = total - weight, -(-len(weights) // _NUM_PARTS)
    for start in range(0, len(weights), size):  # often the first parts are enough
        if weight < least or before < mass:
            break
        part = weights[start : start + size]
        before -= float(np.dot(part, part < weight))
    if before >= mass:
        before -= weight * int(np.count_nonzero(weights[token + 1 :] == weight))
    return weight >= least and before < mass
