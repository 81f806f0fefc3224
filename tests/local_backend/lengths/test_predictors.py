"""Predictors: quantiles ascend and lie where they should, templates are told apart, replies are read."""

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

from local_backend import SamplingParams
from local_backend.lengths import quantiles
from local_backend.lengths.length_log import LengthExample, LengthLog, read_lengths
from local_backend.lengths.quantiles import (
    QuantileEnsemble,
    ascending_tokens,
    fit_quantiles,
    pinball,
)
from local_backend.lengths.trained import HiddenStates, TrainedLengths
from local_backend.scheduling.lengths import LearningPredictor, LengthErrors, ObservedLengths, Prediction
from tests.local_backend.conftest import ragged_prompts
from tests.tiny import random_llama


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks, for few features that all matter."""
    for name, value in {
        "_NUM_HIDDEN": 8,
        "_NUM_NETWORKS": 2,
        "_DROPOUT": 0.0,
        "_LEARNING_RATE": 0.02,
        "_MAX_STEPS": 150,
    }.items():
        monkeypatch.setattr(quantiles, name, value)


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


@pytest.mark.usefixtures("quick")
def test_the_maximum_is_learned_from_one_answer_to_each_prompt(tmp_path: Path) -> None:
    learned = fit_quantiles(*_answers(400, 1))
    features, lengths = _answers(200, 2)
    predictions = [one for one in learned.predictions(features) if one is not None]
    errors = LengthErrors.of(predictions, lengths)
    assert errors.mean_absolute_error < 25
    assert 0.8 < errors.share_within_max < 0.97
    narrow, wide = learned(torch.tensor([[0.5, 0.05, 0.5], [0.5, 0.95, 0.5]]))
    assert (wide[-1] - wide[0]) > 2 * (narrow[-1] - narrow[0])
    learned.save(tmp_path / "file", features="these")
    loaded, about = QuantileEnsemble.load(tmp_path / "file")
    assert about == {"features": "these"}
    assert torch.equal(loaded(features), learned(features))


def test_fitting_is_the_same_again_and_leaves_other_draws_alone() -> None:
    state = torch.get_rng_state()
    one, other = (fit_quantiles(*_answers(60, 1)) for _ in range(2))
    features, _ = _answers(10, 2)
    assert torch.equal(one(features), other(features))
    assert torch.equal(torch.get_rng_state(), state)


def test_too_few_or_no_predictor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 20 prompts"):
        fit_quantiles(*_answers(19, 1))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        QuantileEnsemble.load(tmp_path / "nothing")


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
    predictor = TrainedLengths.fit(HiddenStates(model), _examples(120, 1))
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


def test_features_of_another_kind_are_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    class Lengths:
        name = "length"

        def __call__(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor([[float(len(prompt))] for prompt in prompts])

    TrainedLengths.fit(Lengths(), _examples(30, 1)).save(tmp_path)
    assert TrainedLengths.load(tmp_path, Lengths()).predict([[20, 120]])
    with pytest.raises(ValueError, match="'length' features, got 'hidden_state'"):
        TrainedLengths.load(tmp_path, HiddenStates(model))


# Observed -----------------------------------------------------------------------------------------------


def test_templates_are_told_apart_and_strangers_get_what_all_gave() -> None:
    observed = ObservedLengths(min_answers=5)
    assert isinstance(observed, LearningPredictor)
    short, long = [1] * 10, [2] * 40
    assert observed.predict([short]) == [None]
    for number in range(10):
        observed.observe([*short, 100 + number], 10 + number)
        observed.observe([*long, 100 + number], 200 + number)
    predictions = observed.predict([[*short, 7], [*long, 7], [3] * 9, [1]])
    assert predictions[0] == Prediction(14, 18)
    assert predictions[1] == Prediction(204, 208)
    assert predictions[2] == predictions[3] == Prediction(19, 207)
    observed.observe([*short, 1], 1000)
    (after,) = observed.predict([[*short, 7]])
    assert after == Prediction(15, 19)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=20), st.integers(1, 99)), max_size=30))
def test_what_is_remembered_is_bounded_and_predictions_are_of_what_was_seen(
    seen: list[tuple[list[int], int]],
) -> None:
    observed = ObservedLengths(min_answers=1, max_templates=4)
    for prompt, length in seen:
        observed.observe(prompt, length)
    assert len(observed._seen) <= 4
    lengths = {length for _, length in seen}
    for prediction in observed.predict([prompt for prompt, _ in seen]):
        assert prediction is not None
        assert {prediction.num_tokens, prediction.max_num_tokens} <= lengths


# The log ------------------------------------------------------------------------------------------------


def test_a_log_is_read_back_and_goes_on(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "log.jsonl"
    with LengthLog(path) as log:
        log.add([30, 40], 7, SamplingParams(max_tokens=9, temperature=0.5), kind="a")
    with LengthLog(path) as log:
        log.add([50], 8)
    with pytest.raises(ValueError, match="is closed"):
        log.add([50], 8)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"prompt_ids": [3')  # whoever wrote it was killed
    assert read_lengths(path, tokenizer) == [LengthExample((30, 40), 7), LengthExample((50,), 8)]
    first = json.loads(path.read_text("utf-8").splitlines()[0])
    assert (first["temperature"], first["max_tokens"], first["kind"]) == (0.5, 9, "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no example"),
        ('{"prompt": "a"}\n', 'line 1 .* has no "num_tokens"'),
        ('{"prompt": "a", "num_tokens": 0}\n', "of at least 1"),
        ('{"num_tokens": 3}\n', "has no prompt"),
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


def test_the_command_trains_and_measures(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from local_backend.lengths.__main__ import main

    random_llama(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with LengthLog(tmp_path / "log.jsonl") as log:
        for example in _examples(60, 1):
            log.add(example.prompt_ids, example.num_tokens)
    data, model = str(tmp_path / "log.jsonl"), str(tmp_path / "model")
    output = str(tmp_path / "lengths")
    main(["train", data, "--model", model, "--output", output])
    main(["evaluate", data, "--model", model, "--predictor", output])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(printed) == 2
    assert all(figures["predictor"]["num_answers"] > 0 for figures in printed)
    with pytest.raises(SystemExit):
        main(["train", str(tmp_path / "none"), "--model", model, "--output", str(tmp_path / "x")])
    assert "does not exist" in capsys.readouterr().err
