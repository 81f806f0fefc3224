"""Killed at any byte and taken up: the output is that of an undisturbed run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from local_backend.integrations import ordered_output as module
from local_backend.integrations.ordered_output import OrderedOutput

SETTINGS = {"model": "tiny", "seed": 0}
LINES = [f'{{"line": {number}, "text": "{"é" * (number % 7)}\\n"}}\n' for number in range(60)]


def _run(path: Path, order: list[int], *, rng: random.Random, batches: int) -> None:
    """Add what is not there in an order and in pieces; stop after a number of them."""
    with OrderedOutput(path, SETTINGS) as output:
        left = [number for number in order if number not in output]
        for _ in range(batches):
            taken, left = left[: rng.randrange(1, 6)], left[5:]
            output.add({number: LINES[number] for number in taken if number not in output})


@pytest.mark.parametrize("seed", range(12))
def test_killed_at_any_byte_and_taken_up(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(module, "_LARGE_JOURNAL_BYTES", 200)  # so that it is written anew now and then
    rng = random.Random(seed)
    path = tmp_path / "out.jsonl"
    for _ in range(12):
        order = sorted(range(len(LINES)), key=lambda number: number + rng.uniform(0, 20))
        _run(path, order, rng=rng, batches=rng.randrange(1, 4))
        for file in (path, path.with_name("out.jsonl.journal")):  # what had not reached the disk
            content = file.read_bytes()
            file.write_bytes(content + LINES[0].encode()[: rng.randrange(12)])
        written = path.read_text("utf-8")
        assert "".join(LINES).startswith(written[: written.rfind("\n") + 1])
    with OrderedOutput(path, SETTINGS) as output:
        assert output.num_done <= len(LINES)
        output.add({number: line for number, line in enumerate(LINES) if number not in output})
        output.finish()
    assert path.read_text("utf-8") == "".join(LINES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl"]


def test_a_line_is_on_the_disk_when_add_returns_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with OrderedOutput(path, SETTINGS) as output:
        output.add({1: LINES[1], 3: LINES[3]})
        assert path.read_text("utf-8") == ""
        assert LINES[1].strip()[:8].replace('"', '\\"') in output.journal_path.read_text("utf-8")
        output.add({0: LINES[0]})
        assert path.read_text("utf-8") == "".join(LINES[:2])
        assert (3 in output, 2 in output, output.num_written, output.num_done) == (True, False, 2, 3)
        with pytest.raises(ValueError, match="line 3 is there already"):
            output.add({3: LINES[3]})
        with pytest.raises(ValueError, match="line 2 is missing"):
            output.finish()
        output.add({2: LINES[2]})
        assert len(output.journal_path.read_text("utf-8").splitlines()) == 1  # its header alone


def test_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    OrderedOutput(path, SETTINGS).close()
    with pytest.raises(ValueError, match=r"was begun with .*remove"):
        OrderedOutput(path, {**SETTINGS, "seed": 1})


def test_the_file_of_somebody_else_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("one line\nand another without an end", "utf-8")
    with pytest.raises(ValueError, match="no output of an earlier run"):
        OrderedOutput(path, SETTINGS)
    assert path.read_text("utf-8") == "one line\nand another without an end"
