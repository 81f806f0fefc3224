"""Collected answers are what the engine decodes, and stored ones come back as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend import Engine, SamplingParams
from local_backend.training import (
    CollectOptions,
    collect_answers,
    fingerprint,
    stored_answers,
)
from local_backend.training.answers import FAULTS, find_fault, is_repetitive

OPTIONS = CollectOptions(max_tokens=24, max_rows=5)


@pytest.fixture
def ending_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Wanders, and ends nearly every answer soon."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4)
        # Only words: a lone byte of a longer character would make an answer broken.
        words = [len(tokenizer.decode([token])) > 1 for token in range(len(tokenizer))]
        model.lm_head.weight[~torch.tensor(words)] = 0
    assert model.generation_config is not None
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 9))
    return model


def test_answers_are_those_of_the_engine(
    ending_model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """Unfinished ones, too, unless there is only use for the others."""
    short = CollectOptions(max_tokens=3, max_rows=5)
    with Engine(ending_model, tokenizer) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=3, temperature=0.0))
    faults = [
        find_fault(each.token_ids, each.text, has_stopped=each.finish_reason == "stop")
        for each in completions
    ]
    expected = [
        (tuple(prompt), tuple(each.token_ids), fault is None)
        for prompt, each, fault in zip(prompts, completions, faults, strict=True)
    ]
    assert {None, "unfinished"} <= set(faults)
    counts = collect_answers(ending_model, tokenizer, prompts, tmp_path / "all", short)
    assert sum(counts.values()) == len(prompts)
    stored = [(one.prompt_ids, one.answer_ids, one.has_ended) for one in stored_answers(tmp_path / "all")]
    kept = {None, "unfinished", "repetitive"}
    assert stored == [one for one, fault in zip(expected, faults, strict=True) if fault in kept]
    assert counts["kept"] == len(stored)


@pytest.mark.parametrize("cut", ["between lines", "in a line"])
def test_collection_goes_on_where_it_was_interrupted(
    ending_model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    tmp_path: Path,
    cut: str,
) -> None:
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    collect_answers(ending_model, tokenizer, prompts, whole, OPTIONS)
    decoded: list[int] = []

    def dies_at_the_second(asked: Sequence[Sequence[int]], _: Sequence[str]) -> list[bool]:
        decoded.append(len(asked))
        if len(decoded) == 2:
            raise KeyboardInterrupt
        return [True] * len(asked)

    with pytest.raises(KeyboardInterrupt):
        collect_answers(ending_model, tokenizer, prompts, interrupted, OPTIONS, accept=dies_at_the_second)
    if cut == "in a line":
        with (interrupted / "answers.jsonl").open("ab") as file:
            file.write((whole / "answers.jsonl").read_bytes()[:9])
    counts = collect_answers(
        ending_model, tokenizer, prompts, interrupted, OPTIONS, accept=dies_at_the_second
    )
    assert decoded == [5, 5, 5, 2]  # what had been stored is not done again
    assert stored_answers(interrupted) == stored_answers(whole)
    assert counts == collect_answers(ending_model, tokenizer, prompts, interrupted, OPTIONS)


def test_answers_of_another_model_are_refused(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], tmp_path: Path
) -> None:
    collect_answers(model, tokenizer, prompts[:3], tmp_path, OPTIONS)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.01)
    with pytest.raises(ValueError, match="another model"):
        stored_answers(tmp_path, model, tokenizer)
    with pytest.raises(ValueError, match="other settings: model"):
        collect_answers(model, tokenizer, prompts[:3], tmp_path, OPTIONS)


def test_other_prompts_and_options_are_refused(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], tmp_path: Path
) -> None:
    collect_answers(model, tokenizer, prompts[:3], tmp_path, OPTIONS)
    with pytest.raises(ValueError, match=r"prompts\.count 3 \(asked for 4\)"):
        collect_answers(model, tokenizer, prompts[:4], tmp_path, OPTIONS)
    with pytest.raises(ValueError, match=r"options\.max_tokens 24 \(asked for 3\)"):
        collect_answers(model, tokenizer, prompts[:3], tmp_path, CollectOptions(max_tokens=3))
    # How many answers are decoded at once changes none of them: after a lack of memory it may be less.
    collect_answers(model, tokenizer, prompts[:3], tmp_path, replace(OPTIONS, max_rows=1))


def test_a_folder_without_answers_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="collect them first"):
        stored_answers(tmp_path)


def test_the_fingerprint_knows_weights_and_not_their_type(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    model.bfloat16()
    before = fingerprint(model, tokenizer)
    assert fingerprint(model.float(), tokenizer) == before
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert fingerprint(model, tokenizer) != before


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20, unique=True),
    st.integers(2, 12),
    st.lists(st.integers(40, 60), max_size=10),
)
@settings(max_examples=60, deadline=None)
def test_repetition_is_found_wherever_it_stands(span: list[int], repeats: int, around: list[int]) -> None:
    is_long = repeats >= 4 and len(span) * repeats >= 24
    assert is_repetitive([*around, *span * repeats, *around]) == is_long


def test_faults_are_told_apart() -> None:
    assert find_fault([1], "", has_stopped=True) == "empty"
    assert find_fault([1, 2, 3], "abc", has_stopped=False) == "unfinished"
    assert find_fault([1, 2] * 20, "ab" * 20, has_stopped=True) == "repetitive"
    assert find_fault([1, 2, 3], "a\N{REPLACEMENT CHARACTER}", has_stopped=True) == "broken"
    assert find_fault([1, 2, 3], "abc", has_stopped=True) is None
    assert set(FAULTS) == {"empty", "unfinished", "repetitive", "broken", "rejected"}
