"""A trajectory's fixed point is what plain greedy decoding says, and stored ones come back as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend import Completion, Engine, Jacobi, SamplingParams
from local_backend.sequences.outputs import FinishReason, Stats
from local_backend.training import (
    CollectOptions,
    Recorder,
    StoredTrajectories,
    collect_trajectories,
    decode_recorded,
    fingerprint,
)
from local_backend.training.trajectories import FAULTS, find_fault, is_repetitive

OPTIONS = CollectOptions(block_size=6, max_tokens=24, max_rows=4, prompts_per_part=5)


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


def test_recorded_iterates_lead_to_the_greedy_answer(
    ending_model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]]
) -> None:
    params = SamplingParams(max_tokens=24)
    with Engine(ending_model, tokenizer) as plain:
        expected = [completion.token_ids for completion in plain.generate(prompts, params)]
    with Engine(ending_model, tokenizer, drafter=Recorder(Jacobi(6, num_recycled=0))) as engine:
        recorded = list(decode_recorded(engine, prompts, params))
    for answer, prompt, (completion, trajectory) in zip(expected, prompts, recorded, strict=True):
        assert list(trajectory.answer_ids) == answer
        assert list(trajectory.prompt_ids) == prompt
        assert len(trajectory.iterates) == completion.stats.num_forwards
        # Each forward lands what agreed and one token more, and the next block begins behind it.
        assert trajectory.starts == tuple(
            sum(completion.stats.tokens_by_forward[:number]) for number in range(len(trajectory.starts))
        )
        for start, guess, landed in zip(
            trajectory.starts, trajectory.iterates, completion.stats.tokens_by_forward, strict=True
        ):
            assert list(guess[: landed - 1]) == answer[start : start + landed - 1]


def test_what_is_stored_comes_back(
    ending_model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    counts = collect_trajectories(ending_model, tokenizer, prompts, tmp_path, OPTIONS)
    assert sum(counts.values()) == len(prompts)
    stored = StoredTrajectories(tmp_path, ending_model, tokenizer)
    assert len(stored) == counts["kept"] > 0
    recorder = Recorder(Jacobi(OPTIONS.block_size, num_recycled=0))
    with Engine(ending_model, tokenizer, drafter=recorder) as engine:
        again = [
            trajectory
            for completion, trajectory in decode_recorded(engine, prompts, SamplingParams(max_tokens=24))
            if not find_fault(completion)
        ]
    assert list(stored) == again
    assert stored[1] == again[1]


def test_answers_alone_are_the_same_answers(
    ending_model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    stored = []
    for name, options in (("whole", OPTIONS), ("answers", replace(OPTIONS, with_iterates=False))):
        collect_trajectories(ending_model, tokenizer, prompts, tmp_path / name, options)
        stored.append(list(StoredTrajectories(tmp_path / name, ending_model, tokenizer)))
    assert [one.answer_ids for one in stored[0]] == [one.answer_ids for one in stored[1]]
    assert not any(one.starts or one.iterates for one in stored[1])


@pytest.mark.parametrize("cut", ["between lines", "in a line"])
def test_collection_goes_on_where_it_was_interrupted(
    ending_model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    tmp_path: Path,
    cut: str,
) -> None:
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    collect_trajectories(ending_model, tokenizer, prompts, whole, OPTIONS)
    decoded: list[int] = []

    def dies_at_the_second(asked: Sequence[Sequence[int]], _: Sequence[Completion]) -> list[bool]:
        decoded.append(len(asked))
        if len(decoded) == 2:
            raise KeyboardInterrupt
        return [True] * len(asked)

    with pytest.raises(KeyboardInterrupt):
        collect_trajectories(
            ending_model, tokenizer, prompts, interrupted, OPTIONS, accept=dies_at_the_second
        )
    if cut == "in a line":
        with (interrupted / "trajectories.jsonl").open("ab") as file:
            file.write((whole / "trajectories.jsonl").read_bytes()[:9])
    counts = collect_trajectories(
        ending_model, tokenizer, prompts, interrupted, OPTIONS, accept=dies_at_the_second
    )
    assert decoded == [5, 5, 5, 2]  # what had been stored is not done again
    assert list(StoredTrajectories(interrupted)) == list(StoredTrajectories(whole))
    assert counts == collect_trajectories(ending_model, tokenizer, prompts, interrupted, OPTIONS)


def test_trajectories_of_another_model_are_refused(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], tmp_path: Path
) -> None:
    collect_trajectories(model, tokenizer, prompts[:3], tmp_path, OPTIONS)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.01)
    with pytest.raises(ValueError, match="another model"):
        StoredTrajectories(tmp_path, model, tokenizer)
    with pytest.raises(ValueError, match="other settings: model"):
        collect_trajectories(model, tokenizer, prompts[:3], tmp_path, OPTIONS)


def test_other_prompts_and_options_are_refused(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], tmp_path: Path
) -> None:
    collect_trajectories(model, tokenizer, prompts[:3], tmp_path, OPTIONS)
    with pytest.raises(ValueError, match=r"prompts\.count 3 \(asked for 4\)"):
        collect_trajectories(model, tokenizer, prompts[:4], tmp_path, OPTIONS)
    with pytest.raises(ValueError, match=r"options\.block_size 6 \(asked for 3\)"):
        collect_trajectories(model, tokenizer, prompts[:3], tmp_path, CollectOptions(block_size=3))
    # How many answers are decoded at once changes none of them: after a lack of memory it may be less.
    collect_trajectories(model, tokenizer, prompts[:3], tmp_path, replace(OPTIONS, max_rows=1))


def test_a_folder_without_trajectories_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="collect them first"):
        StoredTrajectories(tmp_path)


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
    def fault(token_ids: list[int], text: str, reason: FinishReason = "stop") -> str | None:
        return find_fault(Completion(token_ids, text, reason, Stats(), 1))

    assert fault([1], "") == "empty"
    assert fault([1, 2, 3], "abc", "length") == "unfinished"
    assert fault([1, 2] * 20, "ab" * 20) == "repetitive"
    assert fault([1, 2, 3], "a\N{REPLACEMENT CHARACTER}") == "broken"
    assert fault([1, 2, 3], "abc") is None
    assert set(FAULTS) == {"empty", "unfinished", "repetitive", "broken", "rejected"}
