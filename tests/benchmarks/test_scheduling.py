"""``python -m benchmarks.scheduling``: what it reads, what it says, and that it holds what is promised."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.paper_scheduling.replay import made_up_lengths
from benchmarks.scheduling import GENERATED, SIBLINGS, main, measure, predict_from_siblings, read_answers
from local_backend.models.forward_cost import ForwardCost
from local_backend.scheduling.lengths import Prediction

DATA = Path(__file__).parents[3] / "shared" / "data" / "lengths" / "vicuna7b_alpaca_dev.jsonl"
WAYS = ["static_bins", "static_vbs", "static_fcr", "static_all", "slots_first_come", "slots_predicted"]


def write_lengths(path: Path, answers: list[list[int]]) -> Path:
    fields = (GENERATED, *SIBLINGS)
    lines = (json.dumps(dict(zip(fields, lengths, strict=True))) for lengths in answers)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("num_answers", [1, 17, 300])
def test_the_benchmark_says_everything_in_one_line(
    num_answers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--lengths", str(write_lengths(tmp_path / "lengths.jsonl", made_up_lengths(num_answers)))])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    over_vanilla = summary["throughput_over_vanilla"]
    assert list(over_vanilla) == WAYS
    assert 0 <= summary["failure_share"] <= 2
    assert over_vanilla["slots_predicted"] <= summary["bound"] + 1e-3
    assert "siblings" in summary["predictor"]
    assert all(0 < share <= 1.001 for share in summary["ablation"].values())
    if num_answers == 300:
        assert over_vanilla["slots_predicted"] > over_vanilla["static_all"] > 1.3


def test_costs_of_an_engine_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_lengths(tmp_path / "lengths.jsonl", made_up_lengths(64))
    costs = ForwardCost((128, 768), (1, 16), (1, 2), (((1, 2), (4, 8)), ((2, 3), (6, 9))))
    (tmp_path / "costs.json").write_text(json.dumps(asdict(costs)), encoding="utf-8")
    main(["--lengths", str(data), "--cost", str(tmp_path / "costs.json")])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bound"] > 1
    (tmp_path / "costs.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["--lengths", str(data), "--cost", str(tmp_path / "costs.json")])
    assert "holds no costs of forwards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no line"),
        ('{"t0.7": 3, "t0.0": 1, "t0.3": 2}\n', "line 1 .* has no length 't0.5'"),
        ('{"t0.7": "many", "t0.0": 1, "t0.3": 2, "t0.5": 1}\n', "got 'many'"),
        ("[1]\n", "has no length 't0.7'"),
        ("oops\n", "line 1 .* is not JSON"),
    ],
)
def test_a_line_that_is_none_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_answers(path)


def test_lengths_are_cut_to_what_may_be_generated(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "lengths.jsonl", [[9000, 0, 3, 4]])
    assert read_answers(path) == ([512], [[1, 3, 4]])


def test_predictions_are_the_textbook_interval_of_the_siblings() -> None:
    steady, scattered, long = predict_from_siblings([[7, 7, 7], [1, 2, 6], [512, 512, 200]])
    assert steady == Prediction(7, 7)
    # Their variance is ((1 - 3)^2 + (2 - 3)^2 + (6 - 3)^2) / 2 = 7.
    assert scattered.num_tokens == 3
    assert scattered.max_num_tokens == pytest.approx(3 + 1.886 * math.sqrt(7) * math.sqrt(4 / 3))
    assert long.max_num_tokens == 512


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="the lengths of the paper are not in the shared folder")
def test_real_lengths_come_as_near_the_bound_as_promised() -> None:
    lengths, siblings = read_answers(DATA)
    summary = measure(lengths, predict_from_siblings(siblings), ForwardCost.flat(16))
    over_vanilla = summary["throughput_over_vanilla"]
    assert over_vanilla["static_all"] >= 1.8
    assert over_vanilla["slots_predicted"] >= 0.96 * summary["bound"]
    assert summary["ablation"]["groups_predicted"] >= 0.94
    assert summary["ablation"]["groups_perfect"] >= 0.99
    assert summary["padded"]["static_fcr"] > summary["padded"]["static_bins"] > 1
