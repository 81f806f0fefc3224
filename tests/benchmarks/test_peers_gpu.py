"""Every way writes the given answers, and the comparison reports each with what it took."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from benchmarks import peers_gpu
from benchmarks.copy_workloads import forced_tasks
from benchmarks.forced_model import forced_model, relabelled
from benchmarks.peers import Run, Task
from benchmarks.peers_gpu import DRAFTERS, GREEDY, LOOKUP, compare, compare_model, shortened
from benchmarks.time_limit import Clock, TimeIsUp
from tests.tiny import tiny_chat_model, tiny_tokenizer


def test_every_way_writes_the_given_answers() -> None:
    tokenizer = tiny_tokenizer()
    tasks, ids_per_text = relabelled(shortened(forced_tasks(tokenizer, 2, seed=4), 24))
    model = forced_model("tiny", "cpu", 64 + 2 * ids_per_text)
    model.force(tasks, ids_per_text)
    options = argparse.Namespace(device="cpu", batches=[1, 2], cases=1, compiled=False)
    clock = Clock(time.perf_counter(), 2)  # no time is left for a second repeat
    figures = dict(compare_model(model, tokenizer, tasks, options, clock))
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


SMALL = ["--device", "cpu", "--shapes", "tiny", "--batches", "2", "--cases", "1", "--tokens", "8"]
NO_VLLM = ["--vllm-python", "nowhere"]


def test_the_benchmark_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_gpu, "compare", partial(compare, max_repeats=1, warm_up=False))
    tiny_chat_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    questions = ["--questions", "1", "--sot-tokens", "24"]
    peers_gpu.main([*SMALL, *NO_VLLM, *questions, "--seconds", "200", "--model", str(tmp_path)])
    output = capsys.readouterr().out
    results = json.loads(output.splitlines()[-1])
    assert results["is_complete"]
    assert results["sot"]["questions"] == 1
    assert "tokens_per_second_ratio_median" in results["sot"]
    for model in ("pretrained", "tiny"):
        assert set(results[model]) == {"2"}
        assert set(results[model]["2"]) == {GREEDY, *DRAFTERS}
    assert "equal length speedup median" in output


def test_it_ends_when_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.perf_counter()
    peers_gpu.main([*SMALL, *NO_VLLM, "--seconds", "0.01"])
    assert time.perf_counter() - started < 30
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not results["is_complete"]
    assert "tiny" not in results


def test_ways_that_ran_before_the_end_are_reported() -> None:
    num_calls = 0

    def way(tasks: Sequence[Task]) -> Run:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 3:  # two of the warm-up
            raise TimeIsUp
        return Run(tuple((1, 2) for _ in tasks), 1.0, 0.5, 1, 1)

    figures = compare({"first": way, "second": way}, [[Task((3,), (), None, 2)]], seconds=9.0)
    assert set(figures) == {"first"}
    assert figures["first"]["repeats"] == 1


@pytest.mark.slow
def test_vllm_answers_beside_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    python = Path(".vllm/bin/python")
    if not python.exists():
        pytest.skip("vLLM is not installed")
    few = ["--device", "cpu", "--shapes", "--batches", "1", "--cases", "1", "--tokens", "8"]
    peers_gpu.main([*few, "--questions", "1", "--seconds", "400"])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["pretrained"]["1"]["vLLM greedy"]["tokens_per_second"] > 0
