"""Evaluation of consistency training: how fast a model decodes, and whether it keeps its quality.

The measures of CLLM (arXiv 2403.00835) and Jacobi Forcing (arXiv 2512.14681): tokens per forward, wall-clock
speedup over autoregressive decoding, fast-forwarded and stationary tokens.

Knows the engine. Does not know what makes an answer good: the caller defines quality.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from local_backend.drafting import Jacobi
from local_backend.engine.engine import Engine
from local_backend.sequences.outputs import Completion, Trajectory
from local_backend.sequences.sampling import SamplingParams
from local_backend.training.losses import autoregressive_loss
from local_backend.training.packing import Example, PackedBatch, PackedForward, pack
from local_backend.training.trajectories import CollectOptions, Recorder, decode_recorded

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
        fast_forwarded_tokens: Accepted guesses per forward, on average.
        stationary_tokens: Guesses that became right while an earlier guess was still wrong, and stayed right
            until they were accepted; per forward, on average.
        speedup: Autoregressive seconds over Jacobi seconds, batch 1; ``None`` if not timed.
        quality: As the caller measures it; ``None`` if it does not.
    """

    num_prompts: int
    tokens_per_forward: float
    fast_forwarded_tokens: float
    stationary_tokens: float
    speedup: float | None
    quality: float | None
    answers: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The figures by name."""
        return {name: value for name, value in asdict(self).items() if name != "answers"}

    def logged(self) -> dict[str, float]:
        """Those that are logged during training."""
        return {"tokens_per_forward": self.tokens_per_forward, "quality": self.quality or 0.0}


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    block_size: int = 24,
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
    with Engine(model, tokenizer, drafter=Recorder(jacobi)) as engine:
        recorded = list(decode_recorded(engine, prompts, params))
    completions = [completion for completion, _ in recorded]
    num_forwards = max(1, sum(completion.stats.num_forwards for completion in completions))
    return Evaluation(
        num_prompts=len(prompts),
        tokens_per_forward=sum(one.stats.num_tokens for one in completions) / num_forwards,
        fast_forwarded_tokens=sum(one.stats.num_accepted for one in completions) / num_forwards,
        stationary_tokens=sum(num_stationary(trajectory) for _, trajectory in recorded) / num_forwards,
        speedup=_speedup(model, tokenizer, prompts[:num_timed], params, jacobi) if num_timed else None,
        quality=quality(completions) if quality else None,
        answers=tuple(tuple(completion.token_ids) for completion in completions),
    )


def num_stationary(trajectory: Trajectory) -> int:
    """Guesses after a wrong one that were right and stayed right, summed over the forwards.

    Each position of the answer counts at most once: if an earlier guess was wrong in the forward from which
    on the position stayed right.
    """
    answer = trajectory.answer_ids
    came_early: dict[int, bool] = {}  # by position that is right so far: whether behind a wrong guess
    for start, guess in zip(trajectory.starts, trajectory.iterates, strict=True):
        wrong_before = False
        for position, (token, right) in enumerate(zip(guess, answer[start:], strict=False), start):
            if token == right:
                came_early.setdefault(position, wrong_before)
            else:
                came_early.pop(position, None)
                wrong_before = True
    return sum(came_early.values())


def perplexity(model: PreTrainedModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Perplexity of answers given their prompts, over all tokens; ``ValueError`` if there are none."""
    forward = PackedForward(model)
    surprise, count = 0.0, 0
    with torch.inference_mode():
        for at in range(0, len(texts), _ROWS_PER_FORWARD):
            some = [Example(tuple(p), tuple(a)) for p, a in texts[at : at + _ROWS_PER_FORWARD]]
            batch = PackedBatch(*(tensor.to(model.device) for tensor in pack(some)))
            num_tokens = sum(len(example.answer_ids) for example in some)
            surprise += float(autoregressive_loss(forward(model, batch), batch.labels)) * num_tokens
            count += num_tokens
    if not count:
        raise ValueError("there is no text to measure perplexity on: give at least one answer")
    return math.exp(surprise / count)


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
        options: CollectOptions,
        make_quality: MakeQuality | None,
    ) -> None:
        self._prompts = prompts
        params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
        with Engine(plain, tokenizer) as engine:
            self._plain_answers = [one.token_ids for one in engine.generate(prompts, params)]
        self._evaluate = partial(
            evaluate,
            tokenizer=tokenizer,
            prompts=prompts,
            max_tokens=options.max_tokens,
            block_size=options.block_size,
            quality=make_quality(prompts) if make_quality else self._share_of_plain_answers,
        )

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """What is logged during training."""
        return self._evaluate(model).logged()

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
        f"autoregressive, {figures.fast_forwarded_tokens:.2f} fast-forwarded and "
        f"{figures.stationary_tokens:.2f} stationary, quality {figures.quality:.3f}; of the plain model's "
        f"answers {likeness.same_answers:.1%} the same, perplexity {likeness.perplexity:.4f}"
    )
