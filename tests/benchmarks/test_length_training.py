"""Length predictors: fitted ones, and the command that fits them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from benchmarks import length_training
from benchmarks import trained_lengths as trained
from benchmarks.length_errors import LengthErrors
from benchmarks.length_training import LengthExample, fit_lengths, fit_quantiles, main, pinball, read_lengths
from benchmarks.trained_lengths import HiddenStates, LengthLog, TrainedLengths, ascending_tokens
from local_backend import Engine, SamplingParams
from local_backend.scheduling.lengths import Scheduling
from tests.local_backend.conftest import ragged_prompts
from tests.tiny import random_llama


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks, for few features that all matter."""
    monkeypatch.setattr(trained, "_NUM_HIDDEN", 8)
    monkeypatch.setattr(trained, "_DROPOUT", 0.0)
    for name, value in {"_NUM_NETWORKS": 2, "_LEARNING_RATE": 0.02, "_MAX_STEPS": 150}.items():
        monkeypatch.setattr(length_training, name, value)


# Quantiles ----------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.floats(-50, 50), min_size=5, max_size=5), min_size=1, max_size=5))
def test_quantiles_ascend_whatever_the_network_says(raw: list[list[float]]) -> None:
    ascending = ascending_tokens(torch.tensor(raw), torch.tensor(4.0), torch.tensor(1.0))
    assert ascending.isfinite().all()
    assert (ascending.diff(dim=1) >= 0).all()


def test_the_pinball_loss_of_one_answer_by_hand() -> None:
    loss = pinball(torch.tensor([[10.0, 30.0]]), torch.tensor([20.0]), (0.5, 0.9))
    assert loss.item() == pytest.approx((0.5 * 10 + 0.1 * 10) / 2)


def _answers(count: int, seed: int) -> tuple[torch.Tensor, list[int]]:
    """One feature sets the middle of the lengths, another how far they scatter; a third says nothing."""
    rng = random.Random(seed)
    features = [[rng.random() for _ in range(3)] for _ in range(count)]
    lengths = [max(1, round(50 + 200 * a + (rng.random() - 0.5) * 100 * b)) for a, b, _ in features]
    return torch.tensor(features), lengths


class _Given:
    """Features that are given as such: the prompts are their numbers."""

    name = "given"

    def __init__(self, features: torch.Tensor) -> None:
        self._features = features

    def __call__(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        return self._features[[number for (number,) in prompts]]


@pytest.mark.usefixtures("quick")
def test_the_maximum_is_learned_from_one_answer_to_each_prompt(tmp_path: Path) -> None:
    networks = fit_quantiles(*_answers(400, 1))
    features, lengths = _answers(200, 2)
    prompts = [[number] for number in range(200)]
    predictor = TrainedLengths(_Given(features), networks)
    errors = LengthErrors.of([one for one in predictor.predict(prompts) if one is not None], lengths)
    assert errors.mean_absolute_error < 25
    assert 0.8 < errors.share_within_max < 0.97
    narrow, wide = networks[0](torch.tensor([[0.5, 0.05, 0.5], [0.5, 0.95, 0.5]]))
    assert (wide[-1] - wide[0]) > 2 * (narrow[-1] - narrow[0])
    predictor.save(tmp_path)
    assert TrainedLengths.load(tmp_path, _Given(features)).predict(prompts) == predictor.predict(prompts)


def test_fitting_is_the_same_again_and_leaves_other_draws_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_training, "_MAX_STEPS", 40)
    state = torch.get_rng_state()
    one, other = (fit_quantiles(*_answers(60, 1)) for _ in range(2))
    features, _ = _answers(10, 2)
    assert all(torch.equal(a.eval()(features), b.eval()(features)) for a, b in zip(one, other, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_too_few_or_no_predictor_are_refused(tmp_path: Path) -> None:
    features, lengths = _answers(19, 1)
    with pytest.raises(ValueError, match="at least 20 prompts"):
        fit_quantiles(features, lengths)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        TrainedLengths.load(tmp_path / "nothing", _Given(features))


# Trained on prompts -------------------------------------------------------------------------------------


def _examples(count: int, seed: int) -> list[LengthExample]:
    """The first token says how long the answer will be, about."""
    rng = random.Random(seed)
    return [
        LengthExample(
            ((kind := rng.choice((20, 90))), *(rng.randrange(100, 200) for _ in range(rng.randrange(3, 9)))),
            kind + rng.randrange(10),
        )
        for _ in range(count)
    ]


def test_what_a_prompt_is_described_by_does_not_depend_on_who_stands_beside_it(
    model: LlamaForCausalLM,
) -> None:
    prompts = ragged_prompts(9, longest=30)
    together = HiddenStates(model)(prompts)
    alone = torch.cat([HiddenStates(model)([prompt]) for prompt in prompts])
    few = HiddenStates(model, max_forward_tokens=40)(prompts)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together, few, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="empty"):
        HiddenStates(model)([[]])


@pytest.mark.usefixtures("quick")
def test_lengths_are_learned_from_hidden_states(model: LlamaForCausalLM, tmp_path: Path) -> None:
    predictor = fit_lengths(HiddenStates(model), _examples(120, 1))
    held_out = _examples(40, 2)
    predictions = predictor.predict([example.prompt_ids for example in held_out])
    errors = LengthErrors.of(
        [one for one in predictions if one is not None], [example.num_tokens for example in held_out]
    )
    assert errors.mean_absolute_error < 20
    predictor.save(tmp_path)
    assert TrainedLengths.load(tmp_path, HiddenStates(model)).predict([[20, 120]]) == predictor.predict(
        [[20, 120]]
    )
    assert predictor.predict([]) == []


@pytest.mark.usefixtures("quick")
def test_features_of_another_kind_are_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    class Lengths:
        name = "length"

        def __call__(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor([[float(len(prompt))] for prompt in prompts])

    fit_lengths(Lengths(), _examples(30, 1)).save(tmp_path)
    assert TrainedLengths.load(tmp_path, Lengths()).predict([[20, 120]])
    with pytest.raises(ValueError, match="'length' features, got 'hidden_state'"):
        TrainedLengths.load(tmp_path, HiddenStates(model))


def test_a_log_is_read_back_and_goes_on(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "log.jsonl"
    LengthLog(path).add([30, 40], 7, SamplingParams(max_tokens=9, temperature=0.5), kind="a")
    LengthLog(path).add([50], 8)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"prompt_ids": [3')  # whoever wrote it was killed
    assert read_lengths(path, tokenizer) == [LengthExample((30, 40), 7), LengthExample((50,), 8)]
    first = json.loads(path.read_text("utf-8").splitlines()[0])
    assert (first["temperature"], first["max_tokens"], first["kind"]) == (0.5, 9, "a")


def test_an_engine_logs_what_was_not_cut_and_a_log_that_fails_costs_no_answer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    prompts, params = ragged_prompts(12, seed=5), SamplingParams(max_tokens=100)
    log = LengthLog(tmp_path / "lengths.jsonl")
    with Engine(model, tokenizer, scheduling=Scheduling(predictor=log)) as engine:
        completions = engine.generate(prompts, params)
        lines = log.path.read_text("utf-8").splitlines()
        log.path.unlink()
        log.path.mkdir()  # cannot be written any more
        assert len(engine.generate(prompts, params)) == 12
    ended = [len(one.token_ids) for one in completions if one.finish_reason == "stop"]
    assert sorted(json.loads(line)["num_tokens"] for line in lines) == sorted(ended)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no example"),
        ('{"prompt": "a"}\n', 'line 1 .* has no "num_tokens"'),
        ('{"prompt": "a", "num_tokens": 0}\n', "of at least 1"),
        ('{"num_tokens": 3}\n', "there is no prompt"),
        ('{"prompt": "a", "num_tokens": 3}\n{oops\n', "line 2 .* is not JSON"),
    ],
)
def test_a_line_that_is_none_is_named(
    text: str, message: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_lengths(path, tokenizer)


@pytest.mark.usefixtures("quick")
def test_the_command_trains_and_measures(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_llama(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for example in _examples(60, 1):
        LengthLog(tmp_path / "log.jsonl").add(example.prompt_ids, example.num_tokens)
    data, model = str(tmp_path / "log.jsonl"), str(tmp_path / "model")
    output = str(tmp_path / "lengths")
    main(["train", data, "--model", model, "--output", output])
    main(["evaluate", data, "--model", model, "--predictor", output])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(printed) == 2
    assert all(figures["predictor"]["num_answers"] > 0 for figures in printed)
    with pytest.raises(SystemExit):
        main(["train", str(tmp_path / "none"), "--model", model, "--output", str(tmp_path / "x")])
    assert "No such file" in capsys.readouterr().err
