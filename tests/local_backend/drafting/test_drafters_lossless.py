"""Every drafter, in every batch, on every architecture, writes what the model itself would have written."""

from __future__ import annotations

import functools
import gc
import itertools
import time

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.span_copy import SpanCopy
from local_backend import (
    ChatLocal,
    Combined,
    Drafter,
    Engine,
    Jacobi,
    Lookahead,
    SamplingParams,
)
from local_backend.drafting.drafter import PerRow
from local_backend.langchain.chat_format import chat_prompt
from local_backend.models.forward_cost import ForwardCost
from local_backend.sequences.outputs import Completion, Update
from local_backend.sequences.sampling import probabilities
from local_backend.sequences.sequence import Row
from tests.local_backend.conftest import greedy, ragged_prompts
from tests.local_backend.models.architectures import ARCHITECTURES, WINDOW, random_model
from tests.tiny import random_llama

NAMES = ("autoregressive", "combined", "jacobi", "lookahead", "reference_copy")
MAX_TOKENS = 36
FREE = ForwardCost.flat(100_000)  # nothing is cut: every draft is verified whole
# Enough of them that many an answer ends early, inside a draft or not.
END_TOKENS = (7, *range(100, 105))


@functools.cache
def _model(architecture: str) -> PreTrainedModel:
    return random_model(architecture, eos_token_id=list(END_TOKENS))


@functools.cache
def _prompts_and_answers(architecture: str, count: int) -> tuple[list[list[int]], list[list[int]]]:
    prompts = ragged_prompts(count, seed=10 + count)
    return prompts, [greedy(_model(architecture), prompt, MAX_TOKENS) for prompt in prompts]


def _generate(
    engine: Engine, prompts: list[list[int]], references: list[list[list[int]]], params: SamplingParams
) -> list[Completion]:
    """``engine.generate`` with references as token ids: random ids seldom survive a detour through text."""
    last: dict[int, Update] = {}

    def listener(number: int, update: Update) -> None:
        if update.is_last:
            last[number] = update

    rows = []
    for number, (prompt, texts) in enumerate(zip(prompts, references, strict=True)):
        row = engine.make_row(prompt, functools.partial(listener, number), params=params)
        row.references = tuple(map(tuple, texts))
        rows.append(row)
    engine.submit(rows)
    ends = time.monotonic() + 60
    while len(last) < len(rows):
        assert time.monotonic() < ends
        time.sleep(0.001)
    completions = [last[number].completion for number in range(len(rows))]
    assert None not in completions, [update.error for update in last.values()]
    return completions  # type: ignore[return-value]  # just checked


def _partly_right(answers: list[list[int]]) -> list[list[list[int]]]:
    """References with parts of the row's answer, another's answer backwards, and copies that mislead."""
    references = []
    for number, answer in enumerate(answers):
        misleading = [*answer[4:9], *answer[2:4], 300, *answer[6:8], 301, 302]
        other = answers[(number + 1) % len(answers)]
        references.append([misleading, [11, *answer[3:14], 12, 13], other[::-1], [14, *answer[16:], 15], []])
    return references


def _check(
    architecture: str, drafter: str | Drafter, count: int, *, with_references: bool, tokenizer: object
) -> float:
    """Raises where a text differs; returns tokens per forward."""
    prompts, answers = _prompts_and_answers(architecture, count)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    with Engine(
        _model(architecture), tokenizer, drafter, prefill_chunk_tokens=64, width_costs=FREE
    ) as engine:  # type: ignore[arg-type]  # any causal model
        if with_references:
            completions = _generate(engine, prompts, _partly_right(answers), params)
        else:
            completions = engine.generate(prompts, params)
        assert engine.num_rows == 0
    for answer, completion in zip(answers, completions, strict=True):
        assert completion.token_ids == answer
        assert completion.finish_reason == ("stop" if answer[-1] in END_TOKENS else "length")
        assert completion.stats.num_tokens == len(answer)
    num_tokens = sum(completion.stats.num_tokens for completion in completions)
    return num_tokens / sum(completion.stats.num_forwards for completion in completions)


@pytest.mark.parametrize(
    "architecture",
    # As the tests below: with eight prompts the others are slow.
    [pytest.param(name, marks=[] if name == "gemma3_text" else pytest.mark.slow) for name in ARCHITECTURES],
)
def test_prompts_and_answers_try_what_they_should(architecture: str) -> None:
    """Prompts longer than the window, answers that wander, that end early and that do not."""
    prompts, answers = _prompts_and_answers(architecture, 8)
    assert max(map(len, prompts)) > 3 * WINDOW
    assert min(map(len, prompts)) < WINDOW
    assert sum(len(set(answer)) for answer in answers) > sum(map(len, answers)) / 2
    assert any(answer[-1] in END_TOKENS for answer in answers)
    assert any(len(answer) == MAX_TOKENS for answer in answers)


@pytest.mark.parametrize(
    ("architecture", "drafter"),
    list(zip(ARCHITECTURES, itertools.cycle(["combined", "jacobi", "lookahead", "reference_copy"]))),
)
def test_lossless_on_each_architecture(
    architecture: str, drafter: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    _check(architecture, drafter, 3, with_references=True, tokenizer=tokenizer)


@pytest.mark.parametrize("drafter", NAMES)
def test_lossless_with_each_drafter(drafter: str, tokenizer: PreTrainedTokenizerBase) -> None:
    _check("gemma3_text", drafter, 8, with_references=False, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "drafter",
    [
        SpanCopy(min_match_tokens=1, num_copy_tokens=3),
        SpanCopy(min_match_tokens=3, num_copy_tokens=40),
        Jacobi(block_size=1, num_recycled=0),
        Jacobi(block_size=40, num_recycled=5, ngram_size=2),
        Lookahead(window_size=1, ngram_size=2, num_guesses=1),
        Lookahead(window_size=9, ngram_size=5, num_guesses=6),
        Combined([Lookahead(), SpanCopy()], max_draft_tokens=40, first_rest=2),
    ],
    ids=lambda drafter: type(drafter).__name__,
)
def test_lossless_with_other_parameters(drafter: Drafter, tokenizer: PreTrainedTokenizerBase) -> None:
    _check("llama", drafter, 3, with_references=True, tokenizer=tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("with_references", [False, True], ids=["alone", "references"])
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("drafter", NAMES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lossless(
    architecture: str, drafter: str, count: int, with_references: bool, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokens_per_forward = _check(
        architecture, drafter, count, with_references=with_references, tokenizer=tokenizer
    )
    if drafter == "autoregressive":
        assert tokens_per_forward == 1
    if drafter == "reference_copy" and with_references:
        assert tokens_per_forward > 1.25


# Where drafting helps ------------------------------------------------------------------------------


@pytest.mark.parametrize(("drafter", "at_least"), [("reference_copy", 5), ("combined", 4), ("lookahead", 2)])
def test_the_answer_as_reference_saves_most_forwards(
    drafter: str, at_least: float, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts, _ = _prompts_and_answers("llama", 3)
    params = SamplingParams(max_tokens=60, ignore_end=True)
    with Engine(_model("llama"), tokenizer) as engine:
        answers = [completion.token_ids for completion in engine.generate(prompts, params)]
    references = [[[prompt[-1], *answer]] for prompt, answer in zip(prompts, answers, strict=True)]
    with Engine(_model("llama"), tokenizer, drafter, width_costs=FREE) as engine:
        completions = _generate(engine, prompts, references, params)
    assert [completion.token_ids for completion in completions] == answers
    assert all(completion.stats.tokens_per_forward > at_least for completion in completions)


_PARAMS = SamplingParams(max_tokens=18)
_COMBINED = ("jacobi", "lookahead", "reference_copy")  # all take part in "combined"


@pytest.fixture(scope="module")
def asked(default_chat: ChatLocal) -> list[list[int]]:
    tokenizer = default_chat.engine.tokenizer
    questions = ("How can I sleep better?", "What is the capital of France?")
    return [chat_prompt(tokenizer, [{"role": "user", "content": text}])[0] for text in questions]


@pytest.fixture(scope="module")
def plainly_written(default_chat: ChatLocal, asked: list[list[int]]) -> list[Completion]:
    return default_chat.engine.generate(asked, _PARAMS)


@pytest.mark.parametrize(
    "drafter",
    ["combined", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name in _COMBINED)],
)
def test_the_default_model_writes_the_same_with_every_drafter(
    drafter: str, default_chat: ChatLocal, asked: list[list[int]], plainly_written: list[Completion]
) -> None:
    """On text of a trained model: repeated phrases, copied text and, in a batch, rows that end apart."""
    plain, want = default_chat.engine, plainly_written
    references = [["Unrelated.", completion.text] for completion in want]
    with Engine(plain.model, plain.tokenizer, drafter, width_costs=FREE) as drafting:
        alone = drafting.generate(asked[:1], _PARAMS)
        together = drafting.generate(asked, _PARAMS, references=references)
    assert [completion.token_ids for completion in together] == [completion.token_ids for completion in want]
    assert alone[0].token_ids == want[0].token_ids
    assert all(completion.stats.tokens_per_forward == 1 for completion in want)
    if drafter in ("reference_copy", "combined"):
        assert together[0].stats.tokens_per_forward > 3


# Sampling ------------------------------------------------------------------------------------------

_SMALL = 6
_NUM_DRAWS = 1_500


@functools.cache
def _small_model() -> PreTrainedModel:
    return random_llama(vocab_size=_SMALL, eos_token_id=None, initializer_range=0.15)


@functools.cache
def _expected(prompt: tuple[int, ...], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of each text of three tokens, from the model called plainly."""
    expected: dict[tuple[int, ...], float] = {}
    with torch.no_grad():
        for text in itertools.product(range(_SMALL), repeat=2):
            logits = _small_model()(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 :]
            first, second, third = (probabilities(position, params) for position in logits)
            for token in range(_SMALL):
                expected[(*text, token)] = float(first[text[0]] * second[text[1]] * third[token])
    return expected


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=name, marks=[pytest.mark.slow] if name in _COMBINED else [])
        for number, name in enumerate(NAMES)
    ],
)
def test_sampled_texts_have_the_models_distribution(number: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Chi-square over 1,500 texts of three tokens; right code fails one set of seeds in 10,000 (p = 1e-4)."""
    prompt = (1, 4, 2, 1, 3, 2, 5, 1)
    params = SamplingParams(max_tokens=3, temperature=0.9, top_k=5)
    counts = dict.fromkeys(itertools.product(range(_SMALL), repeat=3), 0)
    name = NAMES[number]
    with Engine(_small_model(), tokenizer, name, width_costs=FREE) as engine:
        completions = engine.generate(
            [prompt] * _NUM_DRAWS,
            [
                SamplingParams(max_tokens=3, temperature=0.9, top_k=5, seed=number * _NUM_DRAWS + draw)
                for draw in range(_NUM_DRAWS)
            ],
        )
    for completion in completions:
        first, second, third = completion.token_ids
        counts[first, second, third] += 1
    num_accepted = sum(completion.stats.num_accepted for completion in completions)
    assert (num_accepted > _NUM_DRAWS / 10) == (name != "autoregressive")
    # Texts that are expected less than ten times are one class, as the approximation by chi-square wants.
    classes: dict[tuple[int, ...], list[float]] = {}
    for text, probability in _expected(prompt, params).items():
        key = text if probability * _NUM_DRAWS >= 10 else ()
        counted, expected = classes.get(key, [0.0, 0.0])
        classes[key] = [counted + counts[text], expected + probability * _NUM_DRAWS]
    assert len(classes) > 30
    statistic = sum((counted - expected) ** 2 / expected for counted, expected in classes.values())
    assert statistic < _chi_square_limit(len(classes) - 1)


def _chi_square_limit(degrees: int) -> float:
    """The value a chi-square variable exceeds with p = 1e-4 (Wilson and Hilferty, good to a percent here)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.719 * spread**0.5) ** 3


# What is left of rows ------------------------------------------------------------------------------


def _states(drafter: object) -> list[PerRow[object]]:
    own = [value for value in vars(drafter).values() if isinstance(value, PerRow)]
    return own + [states for member in getattr(drafter, "drafters", ()) for states in _states(member)]


@pytest.mark.parametrize("name", ["combined", "jacobi", "lookahead", "reference_copy"])
def test_nothing_is_left_of_rows_however_they_end(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    model = random_llama()
    prompts = ragged_prompts(3)
    endless = SamplingParams(ignore_end=True)
    with Engine(model, tokenizer, name, width_costs=FREE) as engine:
        states = _states(engine.drafter)
        assert states
        engine.generate(prompts, SamplingParams(max_tokens=4))

        def left() -> list[int]:
            return [len(each) for each in states if len(each)]

        def nothing_left() -> bool:
            ends = time.monotonic() + 10
            while left() and time.monotonic() < ends:
                time.sleep(0.01)
                gc.collect()  # an error's traceback holds the rows, in a circle
            return not left()

        assert nothing_left()  # finished

        rows: list[Row] = [engine.make_row(prompt, lambda _: None, params=endless) for prompt in prompts]
        engine.submit(rows)
        while any(row.num_cached <= row.num_prompt_tokens for row in rows):
            time.sleep(0.001)
        assert left()
        engine.cancel(rows)
        rows.clear()
        assert nothing_left()  # cancelled

        planted = model.model.layers[1].register_forward_hook(_fail)
        with pytest.raises(ArithmeticError):
            engine.generate(prompts, endless)
        planted.remove()
        assert nothing_left()  # failed

        rows = [engine.make_row(prompt, lambda _: None, params=endless) for prompt in prompts]
        engine.submit(rows)
        while any(row.num_cached <= row.num_prompt_tokens for row in rows):
            time.sleep(0.001)
    rows.clear()
    assert nothing_left()  # closed


def _fail(*_: object) -> None:
    raise ArithmeticError("planted")
