"""The speed of copying is measured on equal answers, and reported with what was asked for."""

from __future__ import annotations

import json

import pytest

from benchmarks import copy_ablation, copy_speed, copy_workloads
from benchmarks.copy_speed import ratios
from benchmarks.peers import Run, aside
from benchmarks.peers_gpu import shortened
from tests.tiny import tiny_tokenizer


def _run(seconds: float, num_tokens: int) -> Run:
    return Run((tuple(range(num_tokens)),), 2 * seconds, seconds, num_tokens, 1)


def test_a_ratio_says_how_many_times_faster() -> None:
    medians = {name: [_run(4.0, 10), _run(4.0, 20)] for name in ("transformers_greedy", "prompt_lookup")}
    medians |= {drafter: [_run(0.5, 10), _run(2.0, 20)] for drafter in copy_speed.DRAFTERS}
    figures = ratios(medians, end_to_end=False)["reference_copy"]
    assert figures["over_transformers_greedy"] == 4.0  # 8 times and 2 times
    assert figures["tokens_per_forward"] == 15.0


def test_forced_answers_are_the_same_by_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    """Every decoding method writes the target, ours and others'."""
    tokenizer = tiny_tokenizer()
    (task,) = shortened(copy_workloads.forced_tasks(tokenizer, 1, seed=4), 40)
    models = [aside(lambda: copy_workloads.random_llama("tiny", len(tokenizer), "cpu")) for _ in range(2)]
    for name, way in copy_speed.ways_of(models[0], models[1], tokenizer).items():
        run = way([task])
        assert run.token_ids == (task.target,), name
        assert 0 < run.num_decoded < len(task.target or ())
        assert 0 < run.decode_seconds < run.seconds


@pytest.mark.slow
def test_the_benchmark_prints_every_workload_and_its_twin(capsys: pytest.CaptureFixture[str]) -> None:
    copy_speed.main(
        ["--shape", "tiny", "--cases", "1", "--batch", "2", "--repeats", "1", "--max-tokens", "16"]
    )
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    for workload in ("tiny_forced", "batch_2", "unforced"):
        for name in (workload, f"{workload}_end_to_end"):
            assert set(results[name]) == set(copy_speed.DRAFTERS)
            for figures in results[name].values():
                assert figures["over_transformers_greedy"] > 0
                assert figures["over_prompt_lookup"] > 0
    assert set(results["unforced_by_kind"]) == set(copy_workloads.QUOTING_REQUESTS)
    assert results["nothing_to_copy"]["combined_over_autoregressive_seconds"] > 0
    assert results["bfloat16"]["all_near_ties"]


@pytest.mark.slow
def test_the_ablation_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    copy_ablation.main(["--shape", "tiny", "--cases", "1", "--n", "1", "2", "--k", "5", "10"])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(results["tokens_per_forward"]) == 2
    assert len(results["milliseconds_per_token"][0]) == 2
    assert results["adaptive"]["tokens_per_forward"] > results["autoregressive"]["tokens_per_forward"]
