"""``python -m benchmarks.router``: what it prints is what routers decided."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import router
from benchmarks.router_training.labels import LabelledQuestion


def test_the_last_line_tells_of_every_router(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = tmp_path / "labels.jsonl"
    lines = [
        {"question": "What helps against hiccups? Give me several things to try.", "use_sot": 1},
        {"question": "Translate 'spoon' into Polish.", "use_sot": 0},
        {"question": "What is 9 * 14?", "use_sot": 0},
    ]
    labels.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(
        router, "words_alone", lambda: lambda question: True
    )  # it is trained, which takes a while
    monkeypatch.setattr(sys, "argv", ["router", "--labels", str(labels)])
    router.main()
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["shipped"]["accuracy"] == summary["shipped"]["f1"] == 1.0
    assert summary["shipped"]["ms_per_question"] > 0
    assert summary["never"] == {
        "accuracy": pytest.approx(2 / 3, abs=1e-4),
        "f1": 0.0,
        "ms_per_question": summary["never"]["ms_per_question"],
        "confusion": {"true_positive": 0, "false_positive": 0, "false_negative": 1, "true_negative": 2},
    }
    assert set(summary) == {"shipped", "rules", "first_certain", "words_alone", "never"}


def test_decisions_are_counted_against_labels() -> None:
    questions = [LabelledQuestion("a", True), LabelledQuestion("b", True), LabelledQuestion("c", False)]
    figures = router.measure(questions, {"only_a": lambda question: question == "a"})["only_a"]["confusion"]
    assert (figures.true_positive, figures.false_negative, figures.true_negative) == (1, 1, 1)
