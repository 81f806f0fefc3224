"""Rows within a memory: what does not fit waits, nothing is lost, and the tokens are those of no limit."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from local_backend import Completion, Engine, SamplingParams
from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.scheduling.lengths import AdmissionPolicy, Prediction, Scheduling
from local_backend.scheduling.memory import MemoryBudget
from local_backend.scheduling.running_batch import RunningBatch
from local_backend.scheduling.scheduler import Scheduler
from local_backend.sequences.outputs import EngineStats, Update
from tests.local_backend.conftest import ragged_prompts
from tests.tiny import random_llama, tiny_tokenizer

POLICIES: tuple[AdmissionPolicy, ...] = ("first_come", "shortest_first", "longest_first")


class Told:
    """Says of each prompt what it was told, exactly or badly."""

    def __init__(self, lengths: dict[tuple[int, ...], int], *, factor: float = 1.0) -> None:
        self.lengths = lengths
        self.factor = factor
        self.observed: list[tuple[tuple[int, ...], int]] = []

    def predict(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None
    ) -> list[Prediction | None]:
        found = (self.lengths.get(tuple(prompt)) for prompt in prompts)
        return [None if n is None else Prediction(self.factor * n, self.factor * n) for n in found]

    def observe(self, prompt: Sequence[int], num_tokens: int) -> None:
        self.observed.append((tuple(prompt), num_tokens))


def bytes_per_token(model: LlamaForCausalLM) -> int:
    config = model.config
    return 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # float32


def lengths_and_params(count: int, *, sampled: bool, longest: int = 60) -> list[SamplingParams]:
    rng = random.Random(count)
    return [
        SamplingParams(
            max_tokens=rng.choice([2, 5, 9, 20, longest]),
            temperature=0.8 if sampled else 0.0,
            seed=number,
            ignore_end=True,
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def work(
    model: LlamaForCausalLM,
) -> Iterator[tuple[list[list[int]], list[SamplingParams], list[Completion]]]:
    """Prompts, greedy and sampled rows, and what an engine without limits makes of them."""
    prompts = ragged_prompts(40, seed=11, longest=40)
    params = [
        one
        for pair in zip(
            lengths_and_params(20, sampled=False), lengths_and_params(20, sampled=True), strict=True
        )
        for one in pair
    ]
    with Engine(model, tiny_tokenizer(), max_rows=8) as engine:
        yield prompts, params, engine.generate(prompts, params)


Work = tuple[list[list[int]], list[SamplingParams], list[Completion]]


@pytest.mark.parametrize(
    "way",
    [
        *[(policy, 0.2, "autoregressive") for policy in POLICIES],
        ("first_come", 3.0, "autoregressive"),
        ("longest_first", 0.2, "jacobi"),
        ("longest_first", 0.2, "combined"),
    ],
    ids=str,
)
def test_the_tokens_are_the_same_within_any_memory(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    work: Work,
    way: tuple[AdmissionPolicy, float, str],
) -> None:
    prompts, params, plain = work
    policy, factor, drafter = way
    told = Told({tuple(p): len(c.token_ids) for p, c in zip(prompts, plain, strict=True)}, factor=factor)
    most = 250 * bytes_per_token(model)
    scheduling = Scheduling(policy, told, max_cache_bytes=most)
    with Engine(model, tokenizer, drafter, max_rows=8, scheduling=scheduling) as engine:
        completions = engine.generate(prompts, params)
        assert 0 < engine.peak_cache_bytes <= most * 1.05
        num_preempted = engine.stats.num_preempted
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    assert sum(c.stats.num_preempted for c in completions) == num_preempted
    assert num_preempted > 0 or factor >= 1


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_rows_where_twenty_fit(tokenizer: PreTrainedTokenizerBase, count: int) -> None:
    """Nothing lost, nothing out of order, memory within the limit at every step."""
    model = random_llama(num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    prompts = [
        [10 + number % 400, 10 + number // 400, *range(10, 14 + number % 5)] for number in range(count)
    ]
    params = [SamplingParams(max_tokens=1 + number % 4, ignore_end=True) for number in range(count)]
    most = 20 * 16 * bytes_per_token(model)
    told = Told({tuple(prompt): 2 for prompt in prompts})
    scheduling = Scheduling("longest_first", told, max_cache_bytes=most)
    held: list[int] = []
    with Engine(model, tokenizer, max_rows=64, scheduling=scheduling) as engine:
        step = engine.step

        def watched() -> bool:
            more = step()
            held.append(_bytes_held(engine))
            return more

        engine.step = watched  # type: ignore[method-assign]  # only watched
        completions = engine.generate(prompts, params)
        assert engine.peak_cache_bytes <= most * 1.05
        assert engine.stats.num_preempted > 0
    assert 0 < max(held) <= most * 1.05
    with Engine(model, tokenizer, max_rows=64) as engine:
        plain = engine.generate(prompts, params)
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    assert [len(c.token_ids) for c in completions] == [one.max_tokens for one in params]


def _bytes_held(engine: Engine) -> int:
    """Memory of the tensors themselves, whatever the cache says of it."""
    tensors = [t for layer in engine._cache.row_layers for t in layer._stores.values()]
    tensors += [t for kept in engine._cache.prefixes.kept.values() for pair in kept.states for t in pair]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_what_can_never_fit_is_named(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    most = 40 * bytes_per_token(model)
    with Engine(model, tokenizer, scheduling=Scheduling(max_cache_bytes=most)) as engine:
        with pytest.raises(ValueError, match=r"a row of 51 tokens needs .* max_cache_bytes=\d+ .*shorten"):
            engine.generate([[20] * 50])
        fits = engine.generate([[20, 21], [30] * 30], SamplingParams(max_tokens=5, ignore_end=True))
        assert [len(one.token_ids) for one in fits] == [5, 5]
        # 35 tokens are left for a row: one that goes on for ever ends with an error, and not before.
        with pytest.raises(ValueError, match="a row of 36 tokens needs"):
            engine.generate([[20, 21]], SamplingParams(max_tokens=60, ignore_end=True))
        assert (
            len(engine.generate([[20, 21]], SamplingParams(max_tokens=34, ignore_end=True))[0].token_ids)
            == 34
        )
        assert engine.num_rows == 0
    with pytest.raises(ValueError, match="a row of 2 tokens needs"):
        Engine(model, tokenizer, scheduling=Scheduling(max_cache_bytes=bytes_per_token(model)))


@pytest.mark.parametrize(
    ("policy", "order"),
    [("first_come", [0, 1, 2, 3]), ("shortest_first", [3, 1, 0, 2]), ("longest_first", [2, 0, 1, 3])],
)
def test_rows_begin_in_the_order_of_the_policy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, policy: AdmissionPolicy, order: list[int]
) -> None:
    prompts = ragged_prompts(4, seed=2)
    told = Told({tuple(p): n for p, n in zip(prompts, [30, 20, 40, 10], strict=True)})
    ended: list[int] = []
    done = threading.Event()

    def listener(number: int, update: Update) -> None:
        if update.is_last:
            ended.append(number)
            if len(ended) == len(prompts):
                done.set()

    with Engine(model, tokenizer, max_rows=1, scheduling=Scheduling(policy, told)) as engine:
        params = SamplingParams(max_tokens=50)
        engine.submit(
            [engine.make_row(p, partial(listener, n), params=params) for n, p in enumerate(prompts)]
        )
        assert done.wait(60)
    assert ended == order


def test_a_predictor_learns_from_what_ended_by_itself(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    told = Told({})
    prompts = ragged_prompts(12, seed=5)
    with Engine(model, tokenizer, scheduling=Scheduling("longest_first", told)) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=100))
    ended = [
        (tuple(p), len(c.token_ids))
        for p, c in zip(prompts, completions, strict=True)
        if c.finish_reason == "stop"
    ]
    assert sorted(told.observed) == sorted(ended)
    assert ended


def test_a_predictor_that_fails_costs_no_answer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Told):
        def predict(self, *_: object, **__: object) -> list[Prediction | None]:
            raise ArithmeticError("planted")

    with (
        caplog.at_level(logging.WARNING),
        Engine(model, tokenizer, scheduling=Scheduling("longest_first", Broken({}))) as engine,
    ):
        assert len(engine.generate([[5, 6], [7, 8]], SamplingParams(max_tokens=3))) == 2
    assert "Broken failed with ArithmeticError: planted" in caplog.text


def test_mistakes_are_named(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="no policy is named 'random'"):
        Engine(model, tokenizer, scheduling="random")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(TypeError, match="scheduling is a Scheduling or a policy's name, got int"):
        Engine(model, tokenizer, scheduling=3)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ValueError, match="max_cache_bytes must be at least 1, got 0"):
        Scheduling(max_cache_bytes=0)
    with pytest.raises(ValueError, match="max_overtakes must be at least 0, got -1"):
        Scheduling(max_overtakes=-1)


def test_answers_teach_the_order_of_those_that_still_wait(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Without a predictor of the caller's, what ended says what to expect of prompts that begin alike."""
    short, long = [20] * 10, [30] * 10
    with Engine(model, tokenizer) as engine:
        rows = [
            engine.make_row([*(long if number % 2 else short), 40 + number], lambda _: None)
            for number in range(24)
        ]
    running = RunningBatch(RaggedKVCache(1, max_rows=16), 16)
    scheduler = Scheduler(
        Scheduling("longest_first"),
        running=running,
        cache=RaggedKVCache(1, max_rows=16),
        memory=MemoryBudget(0),
        stats=EngineStats(),
    )
    scheduler.submit(rows)
    scheduler.receive()
    scheduler.admit()
    assert running.rows == rows[:16]  # nothing is known yet
    for number, row in enumerate(rows[:16]):
        row.stats.num_tokens = 50 if number % 2 else 5
        running.remove(row)
        scheduler.observe(row)
    scheduler.admit()
    assert running.rows == [*rows[17::2], *rows[16::2]]
    assert not len(scheduler)


def test_a_limit_beyond_all_use_is_not_taken(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    with Engine(model, tokenizer, max_rows=2, scheduling=Scheduling(max_cache_bytes=2**40)) as engine:
        engine.generate([[20, 21]], SamplingParams(max_tokens=3))
        assert engine.peak_cache_bytes < 2**24
