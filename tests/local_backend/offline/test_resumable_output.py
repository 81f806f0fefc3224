"""Stopped at any moment and resumed: the output is that of an undisturbed run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from local_backend.offline.jsonl import JsonLine, ResumableOutput

SETTINGS = {"model": "tiny", "seed": 0}
RECORDS = [{"line": number, "text": "é" * (number % 7) + "\n"} for number in range(1, 61)]
WHOLE = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)


def _line(record: dict[str, object]) -> JsonLine:
    return JsonLine(Path("in.jsonl"), int(str(record["line"])), b"")


@pytest.mark.parametrize("seed", range(4))
def test_stopped_and_resumed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "out.jsonl"
    num_done = 0
    for _ in range(6):
        order = sorted(RECORDS, key=lambda record: _line(record).number + rng.uniform(0, 20))
        with ResumableOutput(path, SETTINGS) as output:
            assert output.num_done == num_done
            left = [record for record in order if _line(record) not in output]
            taken = left[: rng.randrange(1, 9)]
            for record in taken:
                output.add(record)
            num_done += len(taken)
        assert not path.exists()
    with ResumableOutput(path, SETTINGS) as output:
        for record in RECORDS:
            if _line(record) not in output:
                output.add(record)
        output.finish()
    assert path.read_text("utf-8") == WHOLE
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("num_bytes", [0, 5, 40, 100, 101, 102, 150])
def test_a_run_killed_while_it_wrote_goes_on_after_the_last_whole_line(
    tmp_path: Path, num_bytes: int
) -> None:
    path = tmp_path / "out.jsonl"
    with ResumableOutput(path, SETTINGS) as output:
        for record in RECORDS:
            output.add(record)
    partial = output.partial_path.read_bytes()
    output.partial_path.write_bytes(partial[:num_bytes])
    with ResumableOutput(path, SETTINGS) as output:
        assert output.num_done == max(0, partial[:num_bytes].count(b"\n") - 1)
        for record in RECORDS:
            if _line(record) not in output:
                output.add(record)
        output.finish()
    assert path.read_text("utf-8") == WHOLE


def test_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResumableOutput(path, SETTINGS) as output:
        output.add(RECORDS[0])
    with pytest.raises(ValueError, match=r"was begun with .*remove"):
        ResumableOutput(path, {**SETTINGS, "seed": 1})


def test_a_run_that_has_done_nothing_leaves_nothing(tmp_path: Path) -> None:
    """E.g. one whose model cannot be loaded: the same command can be given with another model."""
    with ResumableOutput(tmp_path / "out.jsonl", SETTINGS):
        pass
    assert not list(tmp_path.iterdir())


def test_the_files_of_others_are_left_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("a line\nand another without an end", "utf-8")
    with pytest.raises(ValueError, match="is not an interrupted run"):
        ResumableOutput(path, SETTINGS)
    partial = tmp_path / "other.partial"
    partial.write_text("not a run " * 40, "utf-8")
    with pytest.raises(ValueError, match="does not belong to an interrupted run"):
        ResumableOutput(tmp_path / "other", SETTINGS)
    assert path.read_text("utf-8").startswith("a line")
    assert partial.read_text("utf-8") == "not a run " * 40


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResumableOutput(path, SETTINGS) as output:
        output.add(RECORDS[0])
        with pytest.raises(ValueError, match="is another run writing it"):
            ResumableOutput(path, SETTINGS)
        output.add(RECORDS[1])
        output.finish()
    assert path.read_text("utf-8") == "".join(WHOLE.splitlines(keepends=True)[:2])
