"""The benchmark of ways of batching, at the size of a toy: all of them write the same."""

from __future__ import annotations

import json

import pytest

from benchmarks.batch_throughput import main

WAYS = {"vanilla", "generate_batch", "static", "slots_first_come", "slots_predicted", "slots_combined"}


@pytest.mark.parametrize(
    "model",
    ["random", pytest.param("pretrained", marks=pytest.mark.slow)],
)
def test_every_way_writes_the_same(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "7", "--batch", "3", "--repeats", "1", "--shape", "tiny", "--models", model])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = results["tiny" if model == "random" else "pretrained"]
    assert figures["rows"] == 7
    assert figures["tokens"] >= 7
    assert figures["answers_that_differ"] == dict.fromkeys(WAYS, 0)
    for name in ("tokens_per_second", "over_vanilla", "over_generate_batch"):
        assert figures[name].keys() == WAYS
        assert all(value > 0 for value in figures[name].values())
    assert figures["over_vanilla"]["vanilla"] == figures["over_generate_batch"]["generate_batch"] == 1
    assert figures["engine_forwards"].keys() == WAYS - {"vanilla", "generate_batch"}
    assert "log-normal" in results["predictions"]
