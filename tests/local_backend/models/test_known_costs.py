"""Costs of forwards are measured once, remembered for the next process, and checked when they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from local_backend import Engine, SamplingParams
from local_backend.models import known_costs
from local_backend.models.architecture import Architecture
from local_backend.models.forward_cost import ForwardCost, ForwardTimer, still_holds
from local_backend.models.loading import load
from tests.tiny import random_llama, tiny_tokenizer

COSTS = ForwardCost((128,), (1,), (1, 8, 64), (((1.0, 2.5, 8.0),),))


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ForwardCost]:
    """An empty cache directory, and what is measured from now on."""
    made: list[ForwardCost] = []

    def measure(_: ForwardTimer) -> ForwardCost:
        made.append(COSTS)
        return COSTS

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(known_costs, "measure_forward_cost", measure)
    monkeypatch.setattr(known_costs, "still_holds", lambda costs, timer: True)
    monkeypatch.setattr(known_costs, "_known", {})
    return made


@pytest.fixture
def loaded(tmp_path: Path) -> PreTrainedModel:
    random_llama().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return _load(tmp_path / "model")


def _load(folder: Path, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.eval()


def _known(model: PreTrainedModel) -> ForwardCost:
    return known_costs.known_forward_cost(model, Architecture.of(model))


def _next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_costs, "_known", {})


def _entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.json"))


def test_the_next_process_measures_nothing(
    measured: list[ForwardCost], loaded: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _known(loaded) == _known(loaded) == COSTS
    _next_process(monkeypatch)
    assert _known(loaded) == COSTS
    assert len(measured) == 1
    assert len(_entries(tmp_path)) == 1
    assert len(list((tmp_path / "cache").rglob("*.*"))) == 1  # nothing unfinished


def test_models_of_one_shape_share_an_entry(
    measured: list[ForwardCost], loaded: PreTrainedModel, tmp_path: Path
) -> None:
    loaded.save_pretrained(tmp_path / "another")
    _known(loaded)
    _known(_load(tmp_path / "another"))
    assert len(measured) == 1


def test_what_changes_the_cost_is_measured_again(
    measured: list[ForwardCost], loaded: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _known(loaded)
    _known(_load(tmp_path / "model", dtype=torch.bfloat16))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    _known(loaded)
    monkeypatch.setattr(known_costs, "processor", lambda device: ["another"])
    _known(loaded)
    quantized, _ = load(tmp_path / "model", dtype="bfloat16", quantization="int4")
    _known(quantized.eval())
    loaded.config.num_hidden_layers += 1
    _known(loaded)
    monkeypatch.setattr(torch, "__version__", "99.0")
    _known(loaded)
    assert len(measured) == 7
    assert len(_entries(tmp_path)) == 7


def _with_seconds(seconds: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        entry = json.loads(text)
        entry["costs"]["seconds"] = [[seconds]]
        return json.dumps(entry)

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "{}",
        lambda text: text.replace("threads", "other"),
        _with_seconds([1.0, float("nan"), 4.0]),
        _with_seconds([1.0, -1.0, 4.0]),
        _with_seconds([0.0, 1.0, 4.0]),
        _with_seconds([1.0, 4.0]),
        _with_seconds(["1", "2", "3"]),
        _with_seconds(3),
    ],
)
def test_a_damaged_entry_is_measured_again(
    damage: Callable[[str], str],
    measured: list[ForwardCost],
    loaded: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    _known(loaded)
    (entry,) = _entries(tmp_path)
    whole = entry.read_text()
    entry.write_text(damage(whole))
    _next_process(monkeypatch)
    assert _known(loaded) == COSTS
    assert len(measured) == 2
    assert entry.read_text() == whole


def test_an_entry_that_is_not_text_is_measured_again(
    measured: list[ForwardCost], loaded: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _known(loaded)
    _entries(tmp_path)[0].write_bytes(b"\xff\xfe\x00")
    _next_process(monkeypatch)
    assert _known(loaded) == COSTS
    assert len(measured) == 2


def test_an_entry_that_no_longer_holds_is_measured_again(
    measured: list[ForwardCost], loaded: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _known(loaded)
    monkeypatch.setattr(known_costs, "still_holds", lambda costs, timer: False)
    _next_process(monkeypatch)
    _known(loaded)
    assert len(measured) == 2


def test_a_model_that_was_made_in_memory_leaves_no_entry(measured: list[ForwardCost], tmp_path: Path) -> None:
    model = random_llama()
    assert _known(model) == _known(model) == COSTS
    assert len(measured) == 1
    assert not _entries(tmp_path)


def test_without_a_place_for_entries_costs_are_measured_all_the_same(
    measured: list[ForwardCost], loaded: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert _known(loaded) == COSTS
    assert "cannot save the cost of forwards" in caplog.text


# Checked ---------------------------------------------------------------------------------------------


class _Machine(ForwardTimer):
    """Forwards that take as long as a table says, on a machine ``slower`` than the one it is from."""

    def __init__(self, costs: ForwardCost, slower: float) -> None:
        self._costs, self._slower = costs, slower

    def assume_length(self, context: int) -> None:
        self._context = context

    def __call__(self, num_rows: int, width: int, num_repeats: int = 1) -> float:
        return self._slower * self._costs(context=self._context, rows=num_rows, width=width)


def test_a_busy_machine_changes_nothing_and_another_processor_does() -> None:
    assert still_holds(COSTS, _Machine(COSTS, slower=3.0))
    assert not still_holds(COSTS, _Machine(ForwardCost.flat(64), slower=1.0))
    assert not still_holds(COSTS, _Machine(ForwardCost.flat(1), slower=1.0))


def test_costs_of_a_single_width_hold() -> None:
    narrow = ForwardCost((5,), (1,), (1,), (((1.0,),),))
    assert still_holds(narrow, _Machine(narrow, slower=3.0))


# The engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "num_asked"), [("reference_copy", 1), ("combined", 1), ("autoregressive", 0)]
)
def test_no_answer_waits_for_costs(
    drafter: str,
    num_asked: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are known when the engine is there, which does not ask for them unless it drafts."""
    asked: list[object] = []

    def known(*arguments: object, **options: object) -> ForwardCost:
        asked.append(arguments)
        return COSTS

    monkeypatch.setattr("local_backend.engine.engine.known_forward_cost", known)
    with Engine(model, tokenizer, drafter) as engine:
        assert len(asked) == num_asked
        engine.generate([[5, 6, 7, 8, 9] * 6], SamplingParams(max_tokens=30, ignore_end=True))
        assert len(asked) == num_asked
        if num_asked:
            assert engine.width_costs is COSTS
