"""The benchmark says what it promises to say, of models with random weights, and what it left out."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import jacobi
from benchmarks.decoding_ways import BASELINE, WAYS, Decoded, Way, figures_of
from benchmarks.jacobi_tasks import TASKS, draw_cases
from benchmarks.jacobi_tasks.plain import PlainOptions, make_model, train_tokenizer
from tests.tiny import tiny_chat_model, tiny_tokenizer


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(jacobi, "_MAX_TOKENS", 12)
    cases = list(islice(draw_cases(TASKS["word_problems"], "train"), 100))
    tokenizer = train_tokenizer(cases, 320)
    for seed, kind in enumerate(("plain", "tuned", "draft")):
        model = make_model(PlainOptions(hidden_size=32, num_layers=2, num_heads=2, seed=seed), tokenizer)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
        model.save_pretrained(tmp_path / "word_problems" / kind)
        tokenizer.save_pretrained(tmp_path / "word_problems" / kind)
    return tmp_path


def test_the_summary_has_every_way_and_says_what_is_left_out(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jacobi.main(["--models", str(models), "--cases", "3", "--tasks", *TASKS])
    summary: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    entry = summary["tasks"]["word_problems"]
    assert set(entry["tokens_per_forward"]) == set(entry["speedup"]) == set(WAYS)
    assert set(entry["quality"]) == {"plain", "tuned"}
    assert all(value >= 1 for value in entry["tokens_per_forward"].values())
    assert entry["same_as_autoregressive"] == 1  # float32: the very same tokens
    assert entry["num_cases"] == 3
    assert entry["assisted"]["tokens_per_forward"] >= 1
    assert set(summary["left_out"]) == {"text_to_sql", "python"}
    assert "train text_to_sql" in summary["left_out"]["text_to_sql"]


def test_a_pretrained_model_is_measured_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_chat_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    asked = ["--tasks", "pretrained", "--model", str(tmp_path), "--cases", "2", "--max-tokens", "9"]
    jacobi.main(asked)
    entry = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["tasks"]["pretrained"]
    assert set(entry["tokens_per_forward"]) == {"jacobi", "lookahead", "combined"}
    for figures in (entry, entry["cited"]):
        assert figures["same_as_autoregressive"] == 1
        assert min(figures["tokens_per_forward"].values()) >= 1


def test_with_nothing_to_measure_it_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        jacobi.main(["--models", str(tmp_path), "--tasks", "python"])
    assert "no plain and no tuned model" in capsys.readouterr().err


def test_speed_is_told_in_tokens_a_second() -> None:
    def way(seconds: float, token_ids: list[int], num_forwards: int) -> Way:
        one = Decoded(token_ids, "", num_forwards, seconds, seconds / 2, len(token_ids))
        return Way(lambda _: one, [one])

    ways = {BASELINE: way(2.0, [1] * 10, 10), **{kind: way(0.5, [1] * 10, 4) for kind in WAYS}}
    ways["jacobi_plain"] = way(1.0, [2] * 20, 20)
    figures = figures_of(ways)
    assert figures["speedup"] == {**dict.fromkeys(WAYS, 4.0)}
    assert figures["tokens_per_forward"]["jacobi_tuned"] == 2.5
    assert figures["tokens_per_forward"]["jacobi_plain"] == 1.0
    assert figures["same_as_autoregressive"] == 1


def test_the_last_prompts_are_told_alone() -> None:
    way = Way(lambda _: Decoded([], "", 0), [Decoded([1] * n, f"{n}", 2, 0.5) for n in (8, 4, 6)])
    last = way.last(2)
    assert last.texts == ["4", "6"]
    assert last.tokens_per_forward == 2.5
    assert last.tokens_per_second == 10.0
    assert way.last(0).texts == []
