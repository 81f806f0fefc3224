"""Stopped at any moment and resumed: the output is that of an undisturbed run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from local_backend.offline.ordered_output import OrderedOutput

SETTINGS = {"model": "tiny", "seed": 0}
LINES = [f'{{"line": {number}, "text": "{"é" * (number % 7)}\\n"}}\n' for number in range(60)]


@pytest.mark.parametrize("seed", range(4))
def test_stopped_and_resumed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "out.jsonl"
    num_done = 0
    for _ in range(6):
        order = sorted(range(len(LINES)), key=lambda number: number + rng.uniform(0, 20))
        with OrderedOutput(path, SETTINGS) as output:
            assert output.num_done == num_done
            left = [number for number in order if number not in output]
            taken = left[: rng.randrange(1, 9)]
            output.add({number: LINES[number] for number in taken})
            num_done += len(taken)
        assert not path.exists()
    with OrderedOutput(path, SETTINGS) as output:
        output.add({number: line for number, line in enumerate(LINES) if number not in output})
        output.finish(len(LINES))
    assert path.read_text("utf-8") == "".join(LINES)
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


def test_every_line_is_there_once_before_the_output_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with OrderedOutput(path, SETTINGS) as output:
        output.add({1: LINES[1], 3: LINES[3], 0: LINES[0]})
        assert (3 in output, 2 in output, output.num_done) == (True, False, 3)
        with pytest.raises(ValueError, match="line 3 is there already"):
            output.add({2: LINES[2], 3: LINES[3]})
        with pytest.raises(ValueError, match="1 of 4 lines are missing"):
            output.finish(4)
        assert not path.exists()
        output.add({2: LINES[2]})
        output.finish(4)
    assert path.read_text("utf-8") == "".join(LINES[:4])


def test_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    OrderedOutput(path, SETTINGS).close()
    with pytest.raises(ValueError, match=r"was begun with .*remove"):
        OrderedOutput(path, {**SETTINGS, "seed": 1})


def test_the_files_of_others_are_left_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("a line\nand another without an end", "utf-8")
    with pytest.raises(ValueError, match="is not an interrupted run"):
        OrderedOutput(path, SETTINGS)
    partial = tmp_path / "other.partial"
    partial.write_text("not a database, but long enough to be taken for one " * 40, "utf-8")
    with pytest.raises(ValueError, match="is not of an interrupted run"):
        OrderedOutput(tmp_path / "other", SETTINGS)
    assert path.read_text("utf-8").startswith("a line")
    assert partial.read_text("utf-8").startswith("not a database")


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with OrderedOutput(path, SETTINGS) as output:
        output.add({0: LINES[0]})
        with pytest.raises(ValueError, match="is another run at it"):
            OrderedOutput(path, SETTINGS)
        output.add({1: LINES[1]})
        output.finish(2)
    assert path.read_text("utf-8") == "".join(LINES[:2])
