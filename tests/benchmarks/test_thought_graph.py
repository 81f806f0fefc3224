"""The benchmark of graphs: its ideal, and one small run."""

import json

import pytest

from benchmarks.thought_graph import longest_path, main, summarize


def test_the_longest_path_is_counted_in_nodes() -> None:
    assert longest_path({0: []}) == 1
    assert longest_path({0: [], 1: [0], 2: [], 3: [1, 2]}) == 3


def test_it_prints_its_figures_last(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--graphs", "2", "--nodes", "6", "--seconds", "0.01", "--limit", "0"])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["graphs"] == 2
    assert summary["over_longest_path"] >= 1
    assert summary["questions"] == 0


def test_answers_by_points_count_be_they_graphs_or_not() -> None:
    case = {"plain_seconds": 2.0, "graph_seconds": 1.0, "graph_tokens": 1, "plain_tokens": 1, "num_edges": 2}
    cases = [{**case, "route": route} for route in ("graph", "sot", "plain")]
    assert summarize([], cases)["by_graph"] == 2
