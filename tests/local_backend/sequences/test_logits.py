"""What the generation config says holds at every drafted place, exactly as in ``generate``."""

from __future__ import annotations

import functools
import itertools
import threading
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedTokenizerBase,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from local_backend import Engine, SamplingParams
from local_backend.sequences.logits import TokenBiases
from local_backend.sequences.sampling import probabilities
from tests.local_backend.conftest import greedy, ragged_prompts
from tests.local_backend.engine.test_engine import RandomTrees
from tests.tiny import random_llama

MAX_TOKENS = 30

SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(100, 300)] + [[20, 30]]},
    "sequence_bias": {"sequence_bias": {(44,): 4.0, (45, 46): 9.0, (44, 45): 9.0}},
    "suppress_tokens": {"suppress_tokens": list(range(10, 250))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, 400))},
    "forced_eos_token_id": {"forced_eos_token_id": 33},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": list(range(0, 200))},
    "min_length": {"min_length": 25, "eos_token_id": list(range(0, 200))},
    "both_minimum_lengths": {"min_new_tokens": 6, "min_length": 40, "eos_token_id": list(range(0, 200))},
    "exponential_decay": {"exponential_decay_length_penalty": (5, 1.4)},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "renormalize_logits": {"renormalize_logits": True, "remove_invalid_values": True},
    "several_end_tokens": {"eos_token_id": [7, *range(100, 140)]},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[5], [6, 7]],
        "suppress_tokens": [11, 12, 13],
        "begin_suppress_tokens": [40, 41],
        "min_new_tokens": 10,
        "exponential_decay_length_penalty": (12, 1.1),
    },
}


def _model(**settings: Any) -> LlamaForCausalLM:
    model = random_llama()
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


_PROMPTS = [[9], *ragged_prompts(3, seed=11, longest=40)]


@functools.cache
def _plain_answers() -> list[list[int]]:
    return [greedy(random_llama(), prompt, MAX_TOKENS) for prompt in _PROMPTS]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_generation_config_holds_under_any_tree_of_drafts(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = _model(**SETTINGS[name])
    answers = {tuple(prompt): greedy(model, prompt, MAX_TOKENS) for prompt in _PROMPTS}
    if name != "renormalize_logits":  # the one that cannot change greedy text
        assert _plain_answers() != list(answers.values())
    drafter = RandomTrees(answers)
    with Engine(model, tokenizer, drafter, max_rows=4) as engine:
        completions = engine.generate(_PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    for prompt, completion in zip(_PROMPTS, completions, strict=True):
        assert completion.token_ids == answers[tuple(prompt)]
    assert sum(completion.stats.num_accepted for completion in completions) > 0


def test_a_forced_first_token_is_forced(tokenizer: PreTrainedTokenizerBase) -> None:
    model = _model(forced_bos_token_id=77)
    with Engine(model, tokenizer) as engine:
        (completion,) = engine.generate([[9]], SamplingParams(max_tokens=8))
    assert completion.token_ids == greedy(model, [9], 8)
    assert completion.token_ids[0] == 77


class _Even(LogitsProcessor):
    """Forbids odd tokens after odd lengths."""

    num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        scores[:, input_ids.shape[1] % 2 :: 2] = -torch.inf
        return scores


def test_processors_of_the_user_apply_to_the_engine_or_to_one_row(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = ragged_prompts(4, seed=12, longest=30)

    def wanted(prompt: list[int]) -> list[int]:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            logits_processor=[_Even()],
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
        )
        return output[0, len(prompt) :].tolist()

    answers = {tuple(prompt): wanted(prompt) for prompt in prompts}
    processor = _Even()
    with Engine(model, tokenizer, RandomTrees(answers), logits_processors=[processor]) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    assert [c.token_ids for c in completions] == list(answers.values())
    # Lazily: once for each token chosen, however many places were drafted.
    num_chosen = sum(
        completion.stats.num_accepted + completion.stats.num_forwards for completion in completions
    )
    assert num_chosen <= processor.num_calls < num_chosen + 12 * len(prompts)

    alone = SamplingParams(max_tokens=MAX_TOKENS, logits_processors=(_Even(),))
    plain = SamplingParams(max_tokens=MAX_TOKENS)
    with Engine(model, tokenizer) as engine:
        mixed = engine.generate(prompts, [alone, plain, alone, plain])
    for number, (prompt, completion) in enumerate(zip(prompts, mixed, strict=True)):
        want = answers[tuple(prompt)] if number % 2 == 0 else greedy(model, prompt, MAX_TOKENS)
        assert completion.token_ids == want


def test_a_seed_gives_the_same_text_under_processors_and_drafts(tokenizer: PreTrainedTokenizerBase) -> None:
    model = _model(**SETTINGS["all"])
    prompts = ragged_prompts(5, seed=20, longest=30)
    params = [SamplingParams(max_tokens=25, temperature=0.9, min_p=0.02, seed=number) for number in range(5)]
    with Engine(model, tokenizer) as engine:
        plain = engine.generate(prompts, params)
    right = {tuple(p): c.token_ids for p, c in zip(prompts, plain, strict=True)}
    with Engine(model, tokenizer, RandomTrees(right), max_rows=3) as engine:
        drafted = engine.generate(prompts, params)
    assert [c.token_ids for c in drafted] == list(right.values())
    assert sum(c.stats.num_accepted for c in drafted) > 0


def test_a_users_processor_takes_the_place_of_the_configs(tokenizer: PreTrainedTokenizerBase) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    model = _model(repetition_penalty=1.1)
    prompt = ragged_prompts(1, seed=13)[0]
    with Engine(model, tokenizer, logits_processors=[RepetitionPenaltyLogitsProcessor(1.5)]) as engine:
        (completion,) = engine.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS))
    assert completion.token_ids == greedy(_model(repetition_penalty=1.5), prompt, MAX_TOKENS)


def test_sampling_settings_of_the_config_are_not_applied(tokenizer: PreTrainedTokenizerBase) -> None:
    model = _model(do_sample=True, temperature=3.0, top_k=5, max_new_tokens=3)
    prompt = ragged_prompts(1, seed=14)[0]
    with Engine(model, tokenizer) as engine:
        (completion,) = engine.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS))
    assert completion.token_ids == greedy(random_llama(), prompt, MAX_TOKENS)


def test_the_config_can_be_left_aside(tokenizer: PreTrainedTokenizerBase) -> None:
    model = _model(repetition_penalty=1.5, eos_token_id=list(range(400)), max_time=1.0)
    prompt = ragged_prompts(1, seed=15)[0]
    with Engine(model, tokenizer, use_generation_config=False) as engine:
        (completion,) = engine.generate([prompt], SamplingParams(max_tokens=12, stop_token_ids=(7,)))
    assert completion.token_ids == greedy(random_llama(), prompt, 12)


def test_stop_strings_of_the_config_end_a_row(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = ragged_prompts(1, seed=2)[0]
    params = SamplingParams(max_tokens=40, ignore_end=True)
    with Engine(random_llama(), tokenizer) as engine:
        text = engine.generate([prompt], params)[0].text
    stop = text[10:13]
    with Engine(_model(stop_strings=stop), tokenizer) as engine:
        (completion,) = engine.generate([prompt], params)
    assert completion.text == text[: text.index(stop)]
    assert completion.finish_reason == "stop"


def test_only_the_configs_end_tokens_count(tokenizer: PreTrainedTokenizerBase) -> None:
    model = _model(eos_token_id=None)
    prompts = ragged_prompts(20, seed=16)
    with Engine(model, tokenizer) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=20))
    assert {len(completion.token_ids) for completion in completions} == {20}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_beams": 3}, "asks for beam search"),
        ({"num_beams": 3, "do_sample": True}, "asks for beam"),
        ({"prompt_lookup_num_tokens": 5}, "asks for assisted generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "asks for contrastive search"),
        ({"dola_layers": "low"}, "asks for dola generation"),
        ({"guidance_scale": 1.5}, "runs the model a second time"),
        (
            {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=5, keys=[1, 2, 3])},
            "remembers earlier calls",
        ),
        ({"token_healing": True}, "token_healing = True is not supported"),
        ({"max_time": 2.0}, r"max_time = 2.0 is not supported .* cancel the call"),
        ({"num_return_sequences": 2}, "num_return_sequences = 2"),
    ],
)
def test_what_cannot_be_applied_place_by_place_is_refused(
    settings: dict[str, Any], words: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match=words):
        Engine(_model(**settings), tokenizer)


def test_unusable_processors_are_refused_for_engine_and_row(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, engine: Engine
) -> None:
    from transformers import (
        ClassifierFreeGuidanceLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
        UnbatchedClassifierFreeGuidanceLogitsProcessor,
    )

    guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model)
    beams = PrefixConstrainedLogitsProcessor(lambda _, ids: [5], num_beams=2)
    for processor, words in (
        (guidance, "second time"),
        (ClassifierFreeGuidanceLogitsProcessor(2.0), "second, unconditional row"),
        (beams, "made for beams"),
    ):
        with pytest.raises(ValueError, match=words):
            Engine(model, tokenizer, logits_processors=[processor])
        with pytest.raises(ValueError, match=words):
            engine.generate([[5, 6]], SamplingParams(logits_processors=(processor,)))
    for wrong in (3, lambda ids: ids, lambda ids, scores, more: scores):
        with pytest.raises(TypeError, match="called with token ids and scores"):
            Engine(model, tokenizer, logits_processors=[wrong])  # type: ignore[list-item]  # the mistake


def test_a_constraint_on_one_row_is_kept(engine: Engine) -> None:
    from transformers import PrefixConstrainedLogitsProcessor

    allowed = [50, 51, 52]
    constraint = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed, num_beams=1)
    params = SamplingParams(max_tokens=10, logits_processors=(constraint,), temperature=1.0, seed=1)
    (completion,) = engine.generate([[5, 6]], params)
    assert set(completion.token_ids) <= set(allowed)


def _raises(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if input_ids.shape[1] >= 8:
        raise ArithmeticError("planted")
    return scores


def _rules_out_everything(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores - torch.inf


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        (SamplingParams(max_tokens=20, logits_processors=(_raises,)), ArithmeticError, "planted"),
        (
            SamplingParams(max_tokens=20, temperature=1.0, logits_processors=(_rules_out_everything,)),
            ValueError,
            "no token can be sampled",
        ),
    ],
)
def test_an_error_in_one_row_reaches_its_caller_alone(
    params: SamplingParams,
    error: type[Exception],
    words: str,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    prompts = ragged_prompts(3, seed=17, longest=20)
    answers = {tuple(prompt): greedy(model, prompt, 40) for prompt in prompts}
    answers[5, 6, 7, 8] = list(range(20, 60))
    with Engine(model, tokenizer, RandomTrees(answers)) as engine:
        results: dict[int, list[int]] = {}

        def call(number: int) -> None:
            (completion,) = engine.generate([prompts[number]], SamplingParams(max_tokens=40))
            results[number] = completion.token_ids

        threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        with pytest.raises(error, match=words):
            engine.generate([[5, 6, 7, 8]], params)
        for thread in threads:
            thread.join()
        assert engine.num_rows == 0
    assert [results[number] for number in range(3)] == [answers[tuple(prompt)] for prompt in prompts]


def test_token_ids_of_another_vocabulary_are_named(engine: Engine) -> None:
    with pytest.raises(ValueError, match="from 5 to 500, but the model knows 0 to 499"):
        engine.generate([[6, 7], [5, 500]])


# Log probabilities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3}, {"logits_processors": (_Even(),)}])
def test_logprobs_are_the_models(
    params: dict[str, Any], model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = ragged_prompts(4, seed=18, longest=30)
    asked = SamplingParams(max_tokens=20, logprobs=3, **params)
    with Engine(model, tokenizer) as engine:
        plain = engine.generate(prompts, asked)
        assert engine.generate(prompts[:1], SamplingParams(max_tokens=3))[0].logprobs is None
    answers = {tuple(p): c.token_ids for p, c in zip(prompts, plain, strict=True)}
    with Engine(model, tokenizer, RandomTrees(answers)) as engine:
        drafted = engine.generate(prompts, asked)
    for prompt, completion in itertools.chain(
        zip(prompts, plain, strict=True), zip(prompts, drafted, strict=True)
    ):
        assert completion.token_ids == answers[tuple(prompt)]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)
        assert completion.logprobs is not None
        assert [one.token_id for one in completion.logprobs] == completion.token_ids
        got = torch.tensor([one.logprob for one in completion.logprobs])
        torch.testing.assert_close(
            got, wanted.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0], atol=1e-4, rtol=0
        )
        top = torch.tensor([[value for _, value in one.top] for one in completion.logprobs])
        torch.testing.assert_close(top, wanted.topk(3).values, atol=1e-4, rtol=0)


def test_logprobs_end_where_the_row_ends(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = ragged_prompts(1, seed=19)[0]
    answer = greedy(model, prompt, 30)
    params = SamplingParams(max_tokens=30, stop_token_ids=(answer[9],), logprobs=0)
    with Engine(model, tokenizer, RandomTrees({tuple(prompt): answer})) as engine:
        (completion,) = engine.generate([prompt], params)
    assert completion.token_ids == answer[: answer.index(answer[9]) + 1]
    assert completion.logprobs is not None
    assert [one.token_id for one in completion.logprobs] == completion.token_ids
    assert all(one.top == () for one in completion.logprobs)


def test_min_p_keeps_tokens_by_their_share_of_the_likeliest() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = probabilities(logits, SamplingParams(temperature=1.0, min_p=0.29))
    torch.testing.assert_close(kept, torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95)
    with pytest.raises(ValueError, match="min_p must be 0"):
        SamplingParams(min_p=1.0)
    with pytest.raises(ValueError, match="logprobs must be None"):
        SamplingParams(logprobs=-1)


def test_penalties_are_openais_and_count_the_answer_alone() -> None:
    def penalties(biases: TokenBiases, token_ids: list[int], path: list[int]) -> list[float]:
        ids, amounts = map(torch.from_numpy, biases(token_ids, path))
        return torch.zeros(5).index_add(0, ids, amounts).tolist()

    biases = TokenBiases(2, 0.5, 0.25, 0, ())
    assert penalties(biases, [1, 1, 2, 2], []) == [0, 0, -1, 0, 0]
    assert penalties(biases, [1, 1, 2, 2, 3], []) == [0, 0, -1, -0.75, 0]
    assert penalties(biases, [1, 1, 2, 2, 3], [3, 4, 4]) == [0, 0, -1, -1, -1]  # a draft counts where it is
    assert penalties(biases, [1, 1, 2, 2, 3], []) == [0, 0, -1, -0.75, 0]
    assert penalties(TokenBiases(5, 0.5, 0.25, 0, ()), [1, 1, 2, 2, 3], []) == [0] * 5
    with pytest.raises(ValueError, match="presence_penalty must be from -2 to 2"):
        SamplingParams(presence_penalty=2.5)


@pytest.mark.parametrize("penalties", [{"presence_penalty": 1.5}, {"frequency_penalty": 0.7}])
def test_penalized_answers_are_the_same_with_drafts(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, penalties: dict[str, float]
) -> None:
    prompts = ragged_prompts(3, seed=23)
    params = SamplingParams(max_tokens=40, **penalties)  # type: ignore[arg-type]  # two of its fields
    with Engine(model, tokenizer, "autoregressive") as engine:
        plain = [one.token_ids for one in engine.generate(prompts, params)]
        free = [one.token_ids for one in engine.generate(prompts, SamplingParams(max_tokens=40))]
    trees = RandomTrees({tuple(p): answer for p, answer in zip(prompts, plain, strict=True)})
    with Engine(model, tokenizer, trees) as engine:
        assert [one.token_ids for one in engine.generate(prompts, params)] == plain
    assert plain != free


@pytest.mark.parametrize("drafter", ["autoregressive", "combined"])
def test_no_answer_ends_before_it_has_the_fewest_tokens(
    tokenizer: PreTrainedTokenizerBase, drafter: str
) -> None:
    model = random_llama()
    with Engine(model, tokenizer, drafter) as engine:
        prompt = tokenizer.encode("One two three")
        (free,) = engine.generate([prompt], SamplingParams(max_tokens=40, ignore_end=True))
        ending = free.token_ids[3]  # would end the answer at its fourth token
        stop = (tokenizer.decode([free.token_ids[5]]),)
        bound = SamplingParams(max_tokens=40, min_tokens=20, stop_token_ids=(ending,), stop=stop)
        (held,) = engine.generate([prompt], bound)
        assert len(held.token_ids) >= 20
        assert ending not in held.token_ids[:20]
        assert stop[0] not in tokenizer.decode(held.token_ids[:20]) or len(tokenizer.encode(stop[0])) > 1
    with pytest.raises(ValueError, match="min_tokens must be 0 or more"):
        SamplingParams(min_tokens=-1)
