"""Every way writes the given answers, and the comparison reports each with what it took."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks import peers_gpu
from benchmarks.copy_workloads import forced_tasks
from benchmarks.forced_model import forced_model, relabelled
from benchmarks.peers_gpu import GREEDY, LOOKUP, compare_model, shortened
from tests.tiny import tiny_tokenizer


def test_every_way_writes_the_given_answers() -> None:
    tokenizer = tiny_tokenizer()
    tasks, ids_per_text = relabelled(shortened(forced_tasks(tokenizer, 2, seed=4), 24))
    model = forced_model("tiny", "cpu", 64 + 2 * ids_per_text)
    model.force(tasks, ids_per_text)
    options = argparse.Namespace(device="cpu", batches=[1, 2], cases=1, seconds=0.0, compiled=False)
    figures = compare_model(model, tokenizer, tasks, options)
    assert LOOKUP in figures["1"]
    assert LOOKUP not in figures["2"]
    for size, ways in figures.items():
        for name, way in ways.items():
            assert way["same_answers"] == 1.0, (size, name)
            assert way["repeats"] == 1
            assert way["tokens_per_second"] < way["decode_tokens_per_second"], (size, name)
        assert ways[GREEDY]["tokens_per_forward"] == 1.0
        assert ways["reference_copy"]["tokens_per_forward"] > 1.5
    run = peers_gpu.run_peer(model, tokenizer, tasks)
    assert run.token_ids == tuple(task.target for task in tasks)


@pytest.mark.slow
def test_the_benchmark_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--device cpu --shapes tiny --batches 1 --cases 1 --tokens 8 --seconds 0"
    peers_gpu.main(small.split())
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(results) == {"pretrained", "tiny"}
