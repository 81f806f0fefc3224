"""Weights of reference copy are fitted to answers: they guess better, and nothing else changes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from benchmarks.copy_fit import fit_to_answers, main
from local_backend import ReferenceCopy
from local_backend.drafting.copy_sources import TRAITS
from local_backend.drafting.copy_tree import CopyWeights
from local_backend.drafting.reference_copy import FITTED


def answers(count: int, seed: int = 0) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Answers of phrases that other answers have, too, with numbers of the prompt in them, in turn."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(100, 130) for _ in range(6)] for _ in range(40)]
    found = []
    for _ in range(count):
        numbers = [rng.randrange(130, 150) for _ in range(12)]
        answer = [token for number in numbers[:5] for token in (*rng.choice(phrases), number)]
        found.append((tuple(numbers), (*answer, 1)))
    return found


def test_fitted_weights_guess_more_of_answers_that_they_were_not_fitted_to() -> None:
    found = fit_to_answers(answers(50))
    assert (found.num_fitted, found.num_held_out) == (15, 5)
    assert found.tokens_per_forward > found.tokens_per_forward_before > 1
    assert ReferenceCopy(weights=found.weights).weights is found.weights


def test_too_few_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="20 answers or more, got 3"):
        fit_to_answers(answers(3))


def test_weights_survive_a_file_and_wrong_ones_are_named() -> None:
    assert len(FITTED.traits) == len(TRAITS)
    adapter = TypeAdapter(CopyWeights)
    assert adapter.validate_json(adapter.dump_json(FITTED)) == FITTED
    with pytest.raises(ValueError, match="by_length"):
        adapter.validate_python({"traits": [1.0]})
    with pytest.raises(ValueError, match=r"\(12, 8, 11\) numbers, got \(2, 8, 11\)"):
        replace(FITTED, traits=(1.0, 2.0))


def test_the_command_writes_weights_that_the_drafter_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = [
        {"prompt_ids": prompt, "answer_ids": answer, "has_ended": True} for prompt, answer in answers(20)
    ]
    (tmp_path / "collection.json").write_text("{}")
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in stored))
    file = tmp_path / "fitted" / "weights.json"
    main(["--answers", str(tmp_path), "--output", str(file)])
    report = json.loads(capsys.readouterr().out)
    written = json.loads(file.read_text("utf-8"))
    assert written["report"] == report
    # The same answers, the same weights.
    assert TypeAdapter(CopyWeights).validate_python(written) == fit_to_answers(answers(20)).weights


def test_a_folder_without_answers_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--answers", str(tmp_path / "none"), "--output", str(tmp_path / "weights.json")])
    assert "none" in capsys.readouterr().err
