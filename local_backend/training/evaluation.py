"""Evaluation of consistency training: how fast a model decodes, and whether it keeps its quality.

The measures of CLLM (arXiv 2403.00835) and Jacobi Forcing (arXiv 2512.14681): tokens per forward, wall-clock
speedup over autoregressive decoding.

Knows the engine. Does not know what makes an answer good: the caller defines quality.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from local_backend.drafting import Jacobi
from local_backend.engine.engine import Engine
from local_backend.models.forward_cost import ForwardCost
from local_backend.sequences.outputs import Completion
from local_backend.sequences.sampling import SamplingParams
from local_backend.training.options import TuneOptions
from local_backend.training.packing import PackedForward, Text, Texts, pack
from local_backend.training.trainer import answer_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Quality = Callable[[Sequence[Completion]], float]
MakeQuality = Callable[[Sequence[Sequence[int]]], Quality]  # of the answers to given prompts
_ROWS_PER_FORWARD = 16
_NUM_TIMED = 16


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Measurements of a model on held-out prompts.

    Attributes:
        tokens_per_forward: Emitted tokens over decode forwards, the bonus included.
        speedup: Autoregressive seconds over Jacobi seconds, batch 1; ``None`` if not timed.
        quality: As the caller measures it; ``None`` if it does not.
    """

    num_prompts: int
    tokens_per_forward: float
    speedup: float | None
    quality: float | None
    answers: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def logged(self) -> dict[str, float]:
        """Those that are logged during training."""
        return {"tokens_per_forward": self.tokens_per_forward, "quality": self.quality or 0.0}


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    block_size: int = 16,
    quality: Quality | None = None,
    num_timed: int = 0,
) -> Evaluation:
    """Decode held-out prompts with Jacobi decoding and measure.

    The first ``num_timed`` prompts, one by one, are also timed against autoregressive decoding.

    Raises:
        ValueError: There is no prompt, or one is empty or too long.
    """
    if not prompts:
        raise ValueError("there is nothing to evaluate on: give at least one held-out prompt")
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    jacobi = Jacobi(block_size, num_recycled=0)
    # Whole drafts: a property of the model, not of what pays on this machine.
    whole = ForwardCost.flat(len(prompts) * (block_size + 1))
    with Engine(model, tokenizer, drafter=jacobi, width_costs=whole) as engine:
        completions = engine.generate(prompts, params)
    num_forwards = max(1, sum(completion.stats.num_forwards for completion in completions))
    return Evaluation(
        num_prompts=len(prompts),
        tokens_per_forward=sum(one.stats.num_tokens for one in completions) / num_forwards,
        speedup=_speedup(model, tokenizer, prompts[:num_timed], params, jacobi) if num_timed else None,
        quality=quality(completions) if quality else None,
        answers=tuple(tuple(completion.token_ids) for completion in completions),
    )


@torch.no_grad()
def perplexity(model: PreTrainedModel, texts: Sequence[Text]) -> float:
    """Perplexity of answers given their prompts, over all tokens; ``ValueError`` if there are none."""
    laid_out, forward = Texts.of(texts, model.device), PackedForward(model)
    teacher, surprise = answer_tokens(laid_out), 0.0
    for group in laid_out.groups:
        for rows in torch.arange(group.first, group.stop, device=model.device).split(_ROWS_PER_FORWARD):
            num_tokens = int(laid_out.num_answer[rows].sum())
            batch = pack(laid_out, rows, group, clean_weight=num_tokens)
            surprise += float(forward.loss(batch, teacher)[0])
    return math.exp(surprise / int(laid_out.num_answer.sum()))


@dataclass(frozen=True, slots=True)
class Likeness:
    """How near a model's answers are to those of the plain model.

    Attributes:
        same_answers: Share of answers that are equal, token for token.
        perplexity: Of the plain model's answers, under this model.
    """

    same_answers: float
    perplexity: float


def likeness(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    plain_answers: Sequence[Sequence[int]],
) -> Likeness:
    """Compare a model's answers to prompts with the plain model's, of which there must be as many."""
    pairs = list(zip(answers, plain_answers, strict=True))
    return Likeness(
        same_answers=sum(list(one) == list(other) for one, other in pairs) / max(1, len(pairs)),
        perplexity=perplexity(model, list(zip(prompts, plain_answers, strict=True))),
    )


def _speedup(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    jacobi: Jacobi,
) -> float:
    """Time both drafters on each prompt in turn, so that other load on the machine affects both."""
    with (
        Engine(model, tokenizer, "autoregressive", max_rows=1) as plain,
        Engine(model, tokenizer, jacobi, max_rows=1) as drafting,
    ):
        seconds = {plain: 0.0, drafting: 0.0}
        for engine in seconds:
            engine.generate(prompts[:1], params)  # warm-up
        for prompt in prompts:
            for engine in seconds:
                engine.forget_prefixes()
                started = time.perf_counter()
                engine.generate([prompt], params)
                seconds[engine] += time.perf_counter() - started
        return seconds[plain] / seconds[drafting]


class Exam:
    """Measures models on held-out prompts, and compares their answers with the plain model's."""

    def __init__(
        self,
        plain: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Sequence[int]],
        options: TuneOptions,
        make_quality: MakeQuality | None,
    ) -> None:
        self._prompts = prompts
        max_tokens = options.collect.max_tokens
        with Engine(plain, tokenizer) as engine:
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            self._plain_answers = [one.token_ids for one in engine.generate(prompts, params)]
        self._plain_perplexity = perplexity(plain, list(zip(prompts, self._plain_answers, strict=True)))
        self._evaluate = partial(
            evaluate,
            tokenizer=tokenizer,
            prompts=prompts,
            max_tokens=max_tokens,
            block_size=options.noise.block_size,
            quality=make_quality(prompts) if make_quality else self._share_of_plain_answers,
        )

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """What decides which weights are kept; the perplexity is that over the plain model's."""
        evaluation = self._evaluate(model)
        like = likeness(model, self._prompts, evaluation.answers, self._plain_answers)
        return {**evaluation.logged(), "perplexity": like.perplexity / self._plain_perplexity}

    def grade(self, model: PreTrainedModel) -> tuple[Evaluation, Likeness]:
        """All figures, timed ones too."""
        evaluation = self._evaluate(model, num_timed=_NUM_TIMED)
        return evaluation, likeness(model, self._prompts, evaluation.answers, self._plain_answers)

    def _share_of_plain_answers(self, completions: Sequence[Completion]) -> float:
        pairs = zip(completions, self._plain_answers, strict=True)
        return sum(one.token_ids == plain for one, plain in pairs) / len(self._plain_answers)


def describe(figures: Evaluation, likeness: Likeness) -> str:
    """The figures in one line."""
    return (
        f"{figures.tokens_per_forward:.2f} tokens per forward, {figures.speedup:.2f}x as fast as "
        f"autoregressive, quality {figures.quality:.3f}; of the plain model's answers "
        f"{likeness.same_answers:.1%} the same, perplexity {likeness.perplexity:.4f}"
    )
