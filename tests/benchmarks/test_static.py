"""Static micro-batches: every row once, limits and memory kept, answers unchanged on a real engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from benchmarks.paper_scheduling.static import MicroBatches, StaticOptions
from benchmarks.paper_scheduling.static_run import run_static
from local_backend import Engine, SamplingParams
from local_backend.scheduling.lengths import Prediction
from tests.local_backend.conftest import ragged_prompts

SIZES: dict[str, Any] = {"batch_rows": 4, "max_tokens": 64, "group_rows": 24, "max_rows": 12}
WAYS = {
    "vanilla": StaticOptions.vanilla(batch_rows=4, max_tokens=64, group_rows=24),
    "bins": StaticOptions(**SIZES, bin_tokens=8, variable_batch=False, collect_failures=False),
    "vbs": StaticOptions(**SIZES, bin_tokens=8, collect_failures=False),
    "fcr": StaticOptions(**SIZES, bin_tokens=8, variable_batch=False, predict_maximum=False),
    "all": StaticOptions(**SIZES, bin_tokens=8),
    "redone": StaticOptions(**SIZES, bin_tokens=8, resume=False),
}

rows_of_answers = st.lists(
    st.tuples(st.integers(1, 64), st.none() | st.tuples(st.integers(0, 64), st.integers(0, 64)).map(sorted)),
    min_size=1,
    max_size=24,
)


@pytest.mark.parametrize("way", WAYS)
@given(answers=rows_of_answers)
def test_every_row_ends_once_within_its_limits(way: str, answers: list[tuple[int, list[int] | None]]) -> None:
    options = WAYS[way]
    predictions = [None if said is None else Prediction(*said) for _, said in answers]
    batches = MicroBatches(predictions, options)
    ended: list[int] = []
    written = [0] * len(answers)
    num_aside = 0
    for _ in range(20 * len(answers)):
        batch = batches.next()
        if batch is None:
            break
        assert 1 <= len(batch.rows) <= max(options.max_rows, options.batch_rows)
        assert len(set(batch.rows)) == len(batch.rows)
        if options.variable_batch and options.collect_failures:  # without, batches outgrow their bins
            assert len(batch.rows) * max(batch.limits) <= options.memory_tokens
        for row, limit, start in zip(batch.rows, batch.limits, batch.starts, strict=True):
            assert start == (written[row] if options.resume else 0)
            assert start < limit <= options.max_tokens
            if answers[row][0] <= limit:
                ended.append(row)
            else:
                assert options.collect_failures
                written[row] = limit
                batches.preempt(row)
                num_aside += 1
    assert sorted(ended) == list(range(len(answers)))
    assert batches.num_failures == num_aside


def test_likes_share_a_batch_and_the_shorter_share_a_larger_one() -> None:
    lengths = [60, 5, 58, 6, 7, 61, 5, 8, 62, 6, 5, 7]
    options = replace(WAYS["all"], batch_rows=2, max_rows=8)
    batches = MicroBatches([Prediction(length, length) for length in lengths], options)
    first, second = batches.next(), batches.next()
    assert first is not None
    assert second is not None
    assert {lengths[row] for row in first.rows} <= {58, 60, 61, 62}
    assert len(first.rows) == 2
    assert len(second.rows) == 2
    third = batches.next()
    assert third is not None
    assert len(third.rows) == 8
    assert batches.next() is None


def test_a_row_set_aside_goes_on_with_more_room() -> None:
    batches = MicroBatches([Prediction(4, 4)], WAYS["all"])
    first = batches.next()
    assert first is not None
    assert (first.limits, first.starts) == ((8,), (0,))
    batches.preempt(0)
    second = batches.next()
    assert second is not None
    assert second.starts == (8,)
    assert second.limits[0] > 8


def test_long_prompts_make_batches_smaller() -> None:
    predictions = [Prediction(8, 8)] * 12
    batch = MicroBatches(predictions, WAYS["all"], prompt_tokens=[120] * 12).next()
    assert batch is not None
    assert len(batch.rows) * (120 + 8) <= WAYS["all"].memory_tokens


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="give bin_tokens"):
        StaticOptions(bin_tokens=None)
    with pytest.raises(ValueError, match="batch_rows must be at least 1"):
        StaticOptions(batch_rows=0)
    with pytest.raises(ValueError, match="give one of each"):
        MicroBatches([None], StaticOptions(), max_tokens=[])
    with pytest.raises(ValueError, match="between 1 and 512"):
        MicroBatches([None], StaticOptions(), max_tokens=[513])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return ragged_prompts(20, longest=20)


@pytest.mark.parametrize(("way", "temperature"), [*zip(WAYS, cycle([0.0, 1.0]), strict=False)])
def test_answers_are_those_of_the_engine_alone(
    way: str,
    temperature: float,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
) -> None:
    params = [
        SamplingParams(
            max_tokens=5 + number, temperature=temperature, seed=number, ignore_end=number % 2 == 0
        )
        for number in range(len(prompts))
    ]
    predictions = [Prediction(number % 7, 2 * (number % 7)) for number in range(len(prompts))]  # mostly wrong
    with Engine(model, tokenizer, max_rows=12) as engine:
        alone = engine.generate(prompts, params)
        batched = run_static(engine, prompts, params, predictions, WAYS[way])
    assert [one.token_ids for one in batched] == [one.token_ids for one in alone]
    assert [one.text for one in batched] == [one.text for one in alone]
    assert [one.finish_reason for one in batched] == [one.finish_reason for one in alone]
    assert [one.num_prompt_tokens for one in batched] == [one.num_prompt_tokens for one in alone]


def test_an_unseeded_row_that_is_done_anew_writes_what_it_wrote(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    params = [SamplingParams(max_tokens=40, temperature=1.0, ignore_end=True)] * 4
    starts: dict[int, list[list[int]]] = {}

    class Listening(Engine):
        def generate(self, prompts: Any, params: Any = None, references: Any = None) -> Any:
            completions = super().generate(prompts, params, references)
            for prompt, completion in zip(prompts, completions, strict=True):
                starts.setdefault(hash(tuple(prompt)), []).append(completion.token_ids)
            return completions

    with Listening(model, tokenizer) as engine:
        run_static(engine, prompts[:4], params, [Prediction(8, 8)] * 4, WAYS["redone"])
    for parts in starts.values():
        assert len(parts) > 1
        for earlier, later in pairwise(parts):
            assert later[: len(earlier)] == earlier


def test_a_prompt_near_the_end_of_the_positions_ends_there(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = [11] * 240  # of 256
    params = SamplingParams(max_tokens=64, ignore_end=True)
    with Engine(model, tokenizer) as engine:
        (alone,) = engine.generate([prompt], params)
        (batched,) = run_static(engine, [prompt], [params], [Prediction(4, 4)], WAYS["all"])
    assert batched.token_ids == alone.token_ids
    assert len(alone.token_ids) == 16


def test_lists_of_other_lengths_are_refused(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    with Engine(model, tokenizer) as engine, pytest.raises(ValueError, match="give one of each"):
        run_static(engine, [[5]], [], [None])
