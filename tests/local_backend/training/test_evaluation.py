"""What is measured is what happened."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.decoding_ways import Trajectory, num_stationary
from benchmarks.jacobi_prompts import rouge_l
from local_backend import Completion, Engine, Jacobi, SamplingParams
from local_backend.training import evaluate, perplexity
from local_backend.training.evaluation import likeness

# Place 0 lands by itself; 2 and 3 are right from the start behind a wrong 1; 4 is right, then wrong, then
# right with nothing wrong before it.
TRAJECTORY = Trajectory(
    (1,), (10, 11, 12, 13, 14), (0, 1, 2), ((9, 8, 12, 13, 14), (8, 12, 13, 7), (12, 13, 14))
)


def test_stationary_tokens_are_right_behind_a_wrong_one_and_stay() -> None:
    assert num_stationary(TRAJECTORY) == 2
    assert num_stationary(Trajectory((1,), (5, 6), (0,), ((5, 6),))) == 0
    assert num_stationary(Trajectory((1,), (5, 6), (0, 1), ((4, 4), (4,)))) == 0


def test_an_evaluation_agrees_with_the_engine(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]]
) -> None:
    params = SamplingParams(max_tokens=10)
    with Engine(model, tokenizer) as engine:
        plain = [completion.token_ids for completion in engine.generate(prompts, params)]
    with Engine(model, tokenizer, Jacobi(4, num_recycled=0)) as engine:
        stats = [completion.stats for completion in engine.generate(prompts, params)]

    def as_plain(completions: Sequence[Completion]) -> float:
        same = [completion.token_ids == answer for completion, answer in zip(completions, plain, strict=True)]
        return sum(same) / len(same)

    figures = evaluate(model, tokenizer, prompts, max_tokens=10, block_size=4, quality=as_plain, num_timed=1)
    num_tokens, num_forwards = sum(map(len, plain)), sum(one.num_forwards for one in stats)
    assert figures.quality == 1
    assert figures.tokens_per_forward == pytest.approx(num_tokens / num_forwards)
    assert figures.speedup is not None
    assert figures.speedup > 0
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        evaluate(model, tokenizer, [], max_tokens=4)


def test_perplexity_is_that_of_the_model_itself(model: LlamaForCausalLM) -> None:
    texts = [([5, 6, 7], [8, 9]), ([5], [6, 7, 8, 9])]
    surprise = []
    for prompt, answer in texts:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
        surprise += [-logits[len(prompt) - 1 + place, token].item() for place, token in enumerate(answer)]
    assert perplexity(model, texts) == pytest.approx(math.exp(sum(surprise) / len(surprise)), rel=1e-5)
    with pytest.raises(ValueError, match="nothing to pack"):
        perplexity(model, [])


def test_rouge_l_of_the_benchmark_is_the_f1_of_the_longest_common_subsequence() -> None:
    assert rouge_l([1, 2, 3], [1, 2, 3]) == 1
    assert rouge_l([1, 2, 3, 4], [2, 4, 9]) == pytest.approx(2 * 2 / 7)
    assert rouge_l([1, 2], [2, 1]) == pytest.approx(2 / 4)
    assert rouge_l([1], [2]) == rouge_l([], [2]) == 0
    assert rouge_l([], []) == 1


def test_likeness_compares_answers_with_the_plain_ones(model: LlamaForCausalLM) -> None:
    prompts, plain = [[5, 6, 7], [5]], [[8, 9], [6, 7, 8, 9]]
    told = likeness(model, prompts, [(8, 9), (6, 7)], plain)
    assert told.same_answers == 0.5
    assert told.perplexity == perplexity(model, list(zip(prompts, plain, strict=True)))
    with pytest.raises(ValueError, match="nothing to pack"):
        likeness(model, [], [], [])
