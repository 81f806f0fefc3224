"""Evaluation of consistency training: how fast a model decodes, and whether it keeps its quality.

The measures of CLLM (arXiv 2403.00835) and Jacobi Forcing (arXiv 2512.14681): tokens per forward, wall-clock
speedup over autoregressive decoding, fast-forwarded and stationary tokens, FLOPs per token, peak memory.

Knows the engine. Does not know what makes an answer good: the caller defines quality.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from local_backend.drafting import Drafter, Jacobi
from local_backend.engine.engine import Engine
from local_backend.sequences.outputs import Completion, Trajectory
from local_backend.sequences.sampling import SamplingParams
from local_backend.training.losses import autoregressive_loss
from local_backend.training.packing import Example, PackedForward, pack
from local_backend.training.trajectories import Recorder, decode_recorded

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Quality = Callable[[Sequence[Completion]], float]
_ROWS_PER_FORWARD = 16


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Measurements of a model on held-out prompts.

    Attributes:
        num_prompts: Number of prompts.
        tokens_per_forward: Emitted tokens over decode forwards, the bonus included.
        fast_forwarded_tokens: Accepted guesses per forward, on average.
        stationary_tokens: Guesses that became right while an earlier guess was still wrong, and stayed right
            until they were accepted; per forward, on average.
        speedup: Autoregressive seconds over Jacobi seconds, batch 1; ``None`` if not timed.
        flops_per_token, autoregressive_flops_per_token: Of the decode forwards, at two operations a weight.
        peak_memory_bytes: Of the device, or of this process on a CPU.
        quality: As the caller measures it; ``None`` if it does not.
        answers: Token ids of the answers.
    """

    num_prompts: int
    tokens_per_forward: float
    fast_forwarded_tokens: float
    stationary_tokens: float
    speedup: float | None
    flops_per_token: float
    autoregressive_flops_per_token: float
    peak_memory_bytes: int
    quality: float | None
    answers: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The figures by name."""
        return {name: value for name, value in asdict(self).items() if name != "answers"}


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    block_size: int = 24,
    quality: Quality | None = None,
    num_timed: int = 0,
    num_recycled: int = 0,
) -> Evaluation:
    """Decode held-out prompts with Jacobi decoding and measure.

    Args:
        model: The model to measure.
        tokenizer: Its tokenizer.
        prompts: Token ids of prompts it was not trained on.
        max_tokens: Maximum tokens of an answer.
        block_size: Guesses in the Jacobi block.
        quality: Rates the answers.
        num_timed: Number of prompts, run one by one, on which to time against autoregressive decoding.
        num_recycled: N-grams of the text and of rejected guesses to try beside the block.

    Raises:
        ValueError: There is no prompt, or one is empty or too long.
    """
    if not prompts:
        raise ValueError("there is nothing to evaluate on: give at least one held-out prompt")
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    jacobi = Jacobi(block_size, num_recycled)
    _reset_peak_memory(model)
    with Engine(model, tokenizer, drafter=Recorder(jacobi)) as engine:
        recorded = list(decode_recorded(engine, prompts, params))
    completions = [completion for completion, _ in recorded]
    num_forwards = sum(completion.stats.num_forwards for completion in completions)
    num_tokens = sum(completion.stats.num_tokens for completion in completions)
    num_read = num_forwards + sum(completion.stats.num_drafted for completion in completions)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    return Evaluation(
        num_prompts=len(prompts),
        tokens_per_forward=num_tokens / max(1, num_forwards),
        fast_forwarded_tokens=sum(c.stats.num_accepted for c in completions) / max(1, num_forwards),
        stationary_tokens=sum(num_stationary(trajectory) for _, trajectory in recorded)
        / max(1, num_forwards),
        speedup=_speedup(model, tokenizer, prompts[:num_timed], params, jacobi) if num_timed else None,
        flops_per_token=2 * num_weights * num_read / max(1, num_tokens),
        autoregressive_flops_per_token=2.0 * num_weights,
        peak_memory_bytes=_peak_memory_bytes(model),
        quality=quality(completions) if quality else None,
        answers=tuple(tuple(completion.token_ids) for completion in completions),
    )


def num_stationary(trajectory: Trajectory) -> int:
    """Guesses after a wrong one that were right and stayed right, summed over the forwards.

    Each position of the answer counts at most once: if an earlier guess was wrong in the forward from which
    on the position stayed right.
    """
    answer = trajectory.answer_ids
    settled_at: dict[int, int] = {}
    was_behind_a_wrong_one: dict[int, bool] = {}
    for number, (start, guess) in enumerate(zip(trajectory.starts, trajectory.iterates, strict=True)):
        wrong_before = False
        for place, token in enumerate(guess[: len(answer) - start], start):
            is_right = token == answer[place]
            if not is_right:
                settled_at.pop(place, None)
                wrong_before = True
            elif place not in settled_at:
                settled_at[place] = number
                was_behind_a_wrong_one[place] = wrong_before
    return sum(was_behind_a_wrong_one[place] for place in settled_at)


def perplexity(
    model: PreTrainedModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]], *, pad_id: int = 0
) -> float:
    """Perplexity of answers given their prompts, over all tokens of all answers.

    Args:
        model: The model to measure.
        texts: Prompts and answers.
        pad_id: The padding token.

    Raises:
        ValueError: There is no text.
    """
    forward = PackedForward(model)
    device = model.device
    surprise, count = 0.0, 0
    with torch.inference_mode():
        for at in range(0, len(texts), _ROWS_PER_FORWARD):
            some = [Example(tuple(p), tuple(a)) for p, a in texts[at : at + _ROWS_PER_FORWARD]]
            batch = pack(some, pad_id).to(device)
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
        rouge_l: ROUGE-L of the answers to the plain model's, F1 over tokens, on average.
        perplexity: Of the plain model's answers, under this model.
    """

    same_answers: float
    rouge_l: float
    perplexity: float


def likeness(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    plain_answers: Sequence[Sequence[int]],
) -> Likeness:
    """Compare a model's answers to prompts with the plain model's.

    Raises:
        ValueError: There is no answer, or their numbers differ.
    """
    pairs = list(zip(answers, plain_answers, strict=True))
    return Likeness(
        same_answers=sum(list(one) == list(other) for one, other in pairs) / max(1, len(pairs)),
        rouge_l=sum(rouge_l(one, other) for one, other in pairs) / max(1, len(pairs)),
        perplexity=perplexity(model, list(zip(prompts, plain_answers, strict=True))),
    )


def rouge_l(answer: Sequence[int], reference: Sequence[int]) -> float:
    """ROUGE-L (Lin, 2004) over token ids: F1 of the longest common subsequence; 1 if both are empty."""
    longest = [0] * (len(reference) + 1)  # common with each beginning of the reference
    for token in answer:
        before = 0
        for place, other in enumerate(reference, 1):
            above = longest[place]
            longest[place] = before + 1 if token == other else max(above, longest[place - 1])
            before = above
    total = len(answer) + len(reference)
    return 2 * longest[-1] / total if total else 1.0


def _speedup(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    jacobi: Jacobi,
) -> float:
    """Time both drafters on each prompt in turn, so that other load on the machine affects both."""
    drafters: dict[str, str | Drafter] = {"plain": "autoregressive", "jacobi": jacobi}
    engines = {name: Engine(model, tokenizer, drafter, max_rows=1) for name, drafter in drafters.items()}
    seconds = dict.fromkeys(engines, 0.0)
    try:
        for engine in engines.values():
            engine.generate(prompts[:1], params)  # warm-up
        for prompt in prompts:
            for name, engine in engines.items():
                engine.forget_prefixes()
                started = time.perf_counter()
                engine.generate([prompt], params)
                seconds[name] += time.perf_counter() - started
    finally:
        for engine in engines.values():
            engine.close()
    return seconds["plain"] / seconds["jacobi"]


def _reset_peak_memory(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)


def _peak_memory_bytes(model: PreTrainedModel) -> int:
    if model.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(model.device))
    if sys.platform == "win32":
        return 0  # Windows has no resource module
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
