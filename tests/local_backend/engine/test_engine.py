"""The engine writes what the model would have written, whoever else is in the batch."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from local_backend import Draft, Engine, Outcome, SamplingParams
from local_backend.drafting import RowView
from local_backend.sequences.outputs import EngineStats, Update
from tests.local_backend.conftest import assert_kept_as_read_afresh, greedy, ragged_prompts
from tests.tiny import random_llama, tiny_tokenizer


class RandomTrees:
    """Drafts random trees that often hold the right tokens, so every kind of accept and rollback occurs."""

    def __init__(self, right: dict[tuple[int, ...], list[int]]) -> None:
        self.rng = random.Random(5)
        self.right = right

    def propose(self, rows: Sequence[RowView]) -> list[Draft]:
        drafts = []
        for row in rows:
            answer = self.right.get(tuple(row.token_ids[: row.num_prompt_tokens]), [])
            rest = answer[len(row.token_ids) - row.num_prompt_tokens :]
            token_ids, parents = [], []
            for place in range(self.rng.randrange(0, 12)):
                parent = self.rng.randrange(-1, place)
                depth, ancestor = 0, parent
                while ancestor >= 0:
                    depth, ancestor = depth + 1, parents[ancestor]
                is_right = depth < len(rest) and self.rng.random() < 0.7
                token_ids.append(rest[depth] if is_right else self.rng.randrange(500))
                parents.append(parent)
            drafts.append(Draft(tuple(token_ids), tuple(parents)))
        return drafts

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        assert len(rows) == len(outcomes)


@pytest.mark.parametrize("count", [1, 3, 8, 13])
def test_greedy_is_what_transformers_writes(engine: Engine, model: LlamaForCausalLM, count: int) -> None:
    prompts = ragged_prompts(count, seed=count)
    completions = engine.generate(prompts, SamplingParams(max_tokens=40))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == greedy(model, prompt, 40)
        assert completion.stats.num_forwards == len(completion.token_ids)
        assert completion.stats.tokens_per_forward == 1.0
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 7 else "length")
    assert engine.num_rows == 0


class WholeAnswers(RandomTrees):
    """Drafts the whole answer."""

    def propose(self, rows: Sequence[RowView]) -> list[Draft]:
        answers = [self.right[tuple(row.token_ids[: row.num_prompt_tokens])] for row in rows]
        places = [len(row.token_ids) - row.num_prompt_tokens for row in rows]
        return [Draft.chain(answer[place:]) for place, answer in zip(places, answers, strict=True)]


def test_nothing_is_verified_behind_the_end(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = ragged_prompts(4, seed=4)
    answers = {tuple(prompt): greedy(model, prompt, 40) for prompt in prompts}
    with Engine(model, tokenizer, WholeAnswers(answers)) as engine:
        for prompt, answer in answers.items():
            ending = SamplingParams(max_tokens=40, stop_token_ids=(answer[15],))
            (completion,) = engine.generate([prompt], ending)
            assert completion.finish_reason == "stop"
            assert completion.token_ids == answer[: answer.index(answer[15]) + 1]
            assert completion.stats.num_drafted == completion.stats.num_accepted == len(completion.token_ids)


def test_any_tree_of_drafts_changes_the_forwards_and_not_the_text(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = ragged_prompts(9, seed=3)
    answers = {tuple(prompt): greedy(model, prompt, 40) for prompt in prompts}
    with Engine(model, tokenizer, RandomTrees(answers), max_rows=4) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=40))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == answers[tuple(prompt)]
        assert len(completion.token_ids) == completion.stats.num_tokens
    assert sum(completion.stats.num_accepted for completion in completions) > 0
    total = sum(len(completion.token_ids) for completion in completions)
    assert sum(completion.stats.num_forwards for completion in completions) < total


def test_a_seed_gives_the_same_text_with_and_without_drafts(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, engine: Engine
) -> None:
    prompts = ragged_prompts(5, seed=4)
    params = [
        SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, top_k=40, seed=number)
        for number in range(5)
    ]
    plain = engine.generate(prompts, params)
    right = {tuple(p): c.token_ids for p, c in zip(prompts, plain, strict=True)}
    with Engine(model, tokenizer, RandomTrees(right), max_rows=3) as drafting:
        drafted = drafting.generate(prompts, params)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert sum(c.stats.num_accepted for c in drafted) > 0
    alone = engine.generate([prompts[2]], [params[2]])
    assert alone[0].token_ids == plain[2].token_ids


def test_a_common_beginning_is_read_once(engine: Engine, model: LlamaForCausalLM) -> None:
    beginning = ragged_prompts(1, seed=9, longest=2)[0] + list(range(20, 120))
    prompts = [[*beginning, 200 + number, 300 + number, 8] for number in range(6)]
    completions = engine.generate(prompts, SamplingParams(max_tokens=20))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == greedy(model, prompt, 20)
    read = engine.stats.num_prefilled_tokens
    assert read < len(beginning) + 6 * (3 + 16)  # 16: so much is not worth waiting for
    assert read < sum(map(len, prompts)) / 3
    engine.generate(prompts, SamplingParams(max_tokens=20))
    assert engine.stats.num_prefilled_tokens == read  # kept from the finished rows
    engine.forget_prefixes()
    engine.generate(prompts[:1], SamplingParams(max_tokens=1))
    assert engine.stats.num_prefilled_tokens == read + len(prompts[0]) - 1


@pytest.mark.parametrize(
    ("lengths", "num_prefill_forwards"),
    [
        ((40,), 0),
        ((4, 9, 16), 0),
        ((49,), 0),  # a chunk and its last token
        ((100,), 2),  # two chunks, then what is left
        ((2, 60), 2),  # much would be read that is nothing, and then one of them writes already
    ],
)
def test_the_end_of_a_prompt_is_read_by_the_forward_that_begins_the_answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    num_prefill_forwards: int,
) -> None:
    rng = random.Random(sum(lengths))
    prompts = [[rng.randrange(10, 500) for _ in range(length)] for length in lengths]
    answers = {tuple(prompt): greedy(model, prompt, 20) for prompt in prompts}
    with Engine(model, tokenizer, RandomTrees(answers), prefill_chunk_tokens=48) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=20))
        assert engine.stats.num_prefill_forwards == num_prefill_forwards
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == answers[tuple(prompt)]
        assert completion.stats.num_prefilled == len(prompt) - 1
        assert completion.stats.num_forwards == len(completion.stats.tokens_by_forward)


class AllLogits(LlamaForCausalLM):
    """A model that computes the logits of every token."""

    def forward(  # type: ignore[override]  # it takes fewer arguments: these are told by their names
        self,
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
    ) -> Any:
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)


class CacheByItsLaterName(AllLogits):
    """As models are from transformers 5.24 on."""

    def forward(  # type: ignore[override]  # it takes fewer arguments: these are told by their names
        self,
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
    ) -> Any:
        return super().forward(input_ids, attention_mask, position_ids, cache, use_cache)


@pytest.mark.parametrize("kind", [AllLogits, CacheByItsLaterName])
@pytest.mark.parametrize(("lengths", "num_prefill_forwards"), [((60,), 1), ((4, 9, 16), 0)])
def test_scores_of_a_long_prompt_are_not_computed_where_they_cannot_be_left_out(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    kind: type[AllLogits],
    lengths: Sequence[int],
    num_prefill_forwards: int,
) -> None:
    prompts = [[9, *range(20, 19 + length)] for length in lengths]
    all_logits = kind(model.config).eval()
    all_logits.load_state_dict(model.state_dict())
    with Engine(all_logits, tokenizer) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=5))
        assert engine.stats.num_prefill_forwards == num_prefill_forwards
    assert [one.token_ids for one in completions] == [greedy(model, prompt, 5) for prompt in prompts]


def test_rows_join_while_others_write(engine: Engine, model: LlamaForCausalLM) -> None:
    prompts = ragged_prompts(12, seed=6)
    finished: dict[int, list[int]] = {}
    done = threading.Event()

    def listener(number: int, update: Update) -> None:
        if update.completion is not None:
            finished[number] = update.completion.token_ids
            if len(finished) == len(prompts):
                done.set()

    for number, prompt in enumerate(prompts):
        row = engine.make_row(
            prompt,
            lambda update, number=number: listener(number, update),
            params=SamplingParams(max_tokens=30, ignore_end=True),
        )
        engine.submit([row])
        time.sleep(0.003)
    assert done.wait(30)
    for number, prompt in enumerate(prompts):
        want = greedy(model, prompt, 30)
        assert finished[number][: len(want)] == want


def test_the_end_token_and_the_limits(engine: Engine, model: LlamaForCausalLM) -> None:
    prompt = ragged_prompts(1, seed=1)[0]
    plain = engine.generate([prompt], SamplingParams(max_tokens=12, ignore_end=True))[0]
    assert len(plain.token_ids) == 12
    stopping = plain.token_ids[5]
    stopped = engine.generate([prompt], SamplingParams(max_tokens=12, stop_token_ids=(stopping,)))[0]
    assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(stopping) + 1]
    assert stopped.finish_reason == "stop"
    to_the_end = engine.generate([prompt], SamplingParams(ignore_end=True))[0]
    assert len(prompt) + len(to_the_end.token_ids) == model.config.max_position_embeddings


def test_text_ends_before_a_stop_string_and_streams_add_up(engine: Engine) -> None:
    prompt = ragged_prompts(1, seed=2)[0]
    params = SamplingParams(max_tokens=60, ignore_end=True)
    text = engine.generate([prompt], params)[0].text
    stop = text[10:13]
    stopped = engine.generate([prompt], SamplingParams(max_tokens=60, ignore_end=True, stop=(stop,)))[0]
    assert stopped.text == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"
    pieces = [u.text for u in engine.stream(lambda put: engine.make_row(prompt, put, params=params))]
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "empty"), (list(range(10, 100)) * 3, "270 tokens, but the model has positions for 256")],
)
def test_a_bad_prompt_is_named_before_anything_runs(engine: Engine, prompt: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine.generate([[5, 6], prompt])
    assert engine.num_rows == 0
    assert engine.stats.num_forwards == 0


@pytest.mark.parametrize("prompts", ["What is bread?", ["What is bread?"], [5, 6]])
def test_text_in_place_of_token_ids_is_named(engine: Engine, prompts: Any) -> None:
    with pytest.raises(TypeError, match=r"sequence of token ids, got .*: give a list of prompts"):
        engine.generate(prompts)
    assert engine.num_rows == 0


def test_unknown_drafters_and_uneven_lists_are_named(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, engine: Engine
) -> None:
    with pytest.raises(ValueError, match=r"no drafter is named 'guess'; there are .*autoregressive"):
        Engine(model, tokenizer, "guess")
    with pytest.raises(TypeError, match="propose"):
        Engine(model, tokenizer, 3)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ValueError, match="2 prompts, 1 params"):
        engine.generate([[5], [6]], [SamplingParams()])


async def test_leaving_a_stream_frees_its_row(engine: Engine) -> None:
    row = None

    def make(put):  # noqa: ANN001, ANN202  # the shape is checked where it is used
        nonlocal row
        row = engine.make_row([5, 6, 7, 8], put, params=SamplingParams(ignore_end=True))
        return row

    updates = engine.astream(make)
    await anext(updates)
    await updates.aclose()
    for _ in range(500):
        if engine.num_rows == 0:
            break
        await asyncio.sleep(0.01)
    assert engine.num_rows == 0
    assert row is not None
    assert row.room > 0


def test_warming_up_leaves_nothing_behind(model: LlamaForCausalLM, engine: Engine) -> None:
    prompt = [0] * 30  # begins as the forwards of a warm-up do
    with Engine(model, engine.tokenizer, "reference_copy") as warm:
        warm.warm_up()
        assert warm.stats == EngineStats()
        assert warm.num_rows == 0
        completion = warm.generate([prompt], SamplingParams(max_tokens=20))[0]
        assert completion.token_ids == greedy(model, prompt, 20)
        assert completion.stats.num_prefilled == len(prompt) - 1
        assert warm.stats.num_prefilled_tokens == len(prompt) - 1
        row = warm.make_row(prompt, lambda update: None)
        warm.submit([row])
        warm.warm_up()  # while a row runs
        warm.cancel([row])
    with pytest.raises(RuntimeError, match="closed"):
        warm.warm_up()


def test_an_error_in_a_forward_reaches_everyone_and_the_engine_lives_on(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    model = random_llama()
    with Engine(model, tokenizer) as engine:
        fails = model.model.layers[1].register_forward_hook(_fail)
        with pytest.raises(ArithmeticError, match="planted"):
            engine.generate(ragged_prompts(3), SamplingParams(max_tokens=5))
        fails.remove()
        prompt = ragged_prompts(1)[0]
        again = engine.generate([prompt], SamplingParams(max_tokens=5))[0]
        assert again.token_ids == greedy(model, prompt, 5)


def _fail(*_: object) -> None:
    raise ArithmeticError("planted")


def test_closing_ends_what_runs(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    engine = Engine(model, tokenizer)
    errors: list[BaseException | None] = []
    told = threading.Event()

    def listener(update: Update) -> None:
        if update.is_last:
            errors.append(update.error)
            told.set()

    engine.submit(
        [engine.make_row([5, 6], listener, params=SamplingParams(ignore_end=True)) for _ in range(1)]
    )
    engine.close()
    assert told.wait(10)
    assert isinstance(errors[0], RuntimeError) or errors[0] is None
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([[5, 6]])


def test_a_cancelled_row_is_not_wanted_at_once(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Before the next step frees it: else one answer alone looks like two to whoever counts them."""
    with Engine(model, tokenizer) as engine:
        started = threading.Event()
        row = engine.make_row(
            [5, 6], lambda _: started.set(), params=SamplingParams(max_tokens=200, ignore_end=True)
        )
        engine.submit([row])
        assert started.wait(10)
        assert engine.num_wanted_rows == 1
        engine.cancel([row])
        assert engine.num_wanted_rows == 0


def test_a_forgotten_engine_takes_its_thread_along(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    others = set(threading.enumerate())
    engine = Engine(model, tokenizer)
    engine.generate([[5, 6]], SamplingParams(max_tokens=2))
    gone = weakref.ref(engine)
    (thread,) = set(threading.enumerate()) - others
    assert thread.name == "local_backend.Engine"
    del engine
    for _ in range(200):
        gc.collect()
        if gone() is None and not thread.is_alive():
            return
        time.sleep(0.01)
    pytest.fail("the engine or its thread is still there")


def test_rollback_equals_a_fresh_prefill(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """After any accepts and refusals the kept keys and values are those of reading the text afresh."""
    prompts = ragged_prompts(3, seed=8)
    answers = {tuple(prompt): greedy(model, prompt, 25) for prompt in prompts}
    with Engine(model, tokenizer, RandomTrees(answers)) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=25))
        written = [[*one, *done.token_ids] for one, done in zip(prompts, completions, strict=True)]
        assert_kept_as_read_afresh(engine, written)


def test_a_child_that_calls_its_parents_engine_gets_an_error(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(model, tokenizer) as engine:
        with monkeypatch.context() as child:
            child.setattr("os.getpid", lambda: -1)
            with pytest.raises(RuntimeError, match="start workers first"):
                engine.generate([[5, 6]], SamplingParams(max_tokens=2))
        assert len(engine.generate([[5, 6]], SamplingParams(max_tokens=2))) == 1


@pytest.mark.parametrize("temperature", [1e-8, 1e-38, 1e-45, 1e-300])
def test_next_to_no_temperature_is_greedy(temperature: float) -> None:
    with Engine(random_llama(), tiny_tokenizer()) as engine:
        greedy, sampled = engine.generate(
            [[20, 21]] * 2,
            [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=temperature)],
        )
    assert sampled.token_ids == greedy.token_ids


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        *[({"seed": seed}, ValueError) for seed in (2**64, -(2**63) - 1)],
        *[
            ({name: "5"}, TypeError)
            for name in ("seed", "max_tokens", "top_k", "temperature", "top_p", "logprobs")
        ],
        *[({name: 2.5}, TypeError) for name in ("seed", "max_tokens", "top_k", "min_tokens")],
        *[
            ({name: float("nan")}, ValueError)
            for name in ("temperature", "top_p", "min_p", "presence_penalty")
        ],
        ({"temperature": None}, TypeError),
    ],
)
def test_parameters_that_are_no_numbers_are_named(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{next(iter(wrong))} must be"):
        SamplingParams(**wrong)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.int64(4), top_k=np.int32(5)
    )
    with Engine(random_llama(), tiny_tokenizer()) as engine:
        assert len(engine.generate([[20, 21]], params)[0].token_ids) <= 3
