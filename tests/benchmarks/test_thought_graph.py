"""The benchmark of graphs: its ideal, and one small run."""

import json

import pytest

from benchmarks.thought_graph import longest_path, main


def test_the_longest_path_is_counted_in_nodes() -> None:
    assert longest_path({0: []}) == 1
    assert longest_path({0: [], 1: [0], 2: [], 3: [1, 2]}) == 3


def test_it_prints_its_figures_last(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--graphs", "2", "--nodes", "6", "--seconds", "0.01", "--limit", "0"])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["graphs"] == 2
    assert summary["over_longest_path"] >= 1
    assert summary["questions"] == 0
