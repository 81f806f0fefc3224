"""Batches on a real Ray cluster of two nodes: `make test-ray`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from local_backend import Engine, SamplingParams
from local_backend.models.loading import load
from local_backend.offline.batch import answer_lines
from local_backend.offline.jsonl import read_lines
from local_backend.offline.ray import BatchSettings, answer_block
from tests.local_backend.offline.work import write_requests
from tests.tiny import tiny_chat_model, tiny_tokenizer

ROOT = Path(__file__).parents[3]
pyarrow = pytest.importorskip("pyarrow", reason="blocks are tables of Arrow, which the extra 'ray' brings")


def test_a_block_is_answered_as_the_lines_of_a_file(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_requests(source, 60)
    tiny_chat_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    model, tokenizer = load(tmp_path / "model")
    defaults = SamplingParams(max_tokens=9)
    with Engine(model, tokenizer) as engine:
        records = [record for _, record in answer_lines(engine, read_lines(source), defaults)]
    of_file = sorted(records, key=lambda record: int(record["line"]))
    numbered = enumerate(source.read_text("utf-8").split("\n"), 1)
    rows = [{"line": number, "record": line} for number, line in numbered if line]
    settings = BatchSettings(model=str(tmp_path / "model"), params=defaults)
    answered = answer_block(pyarrow.Table.from_pylist(rows), settings=settings).to_pylist()
    assert [row["line"] for row in answered] == [line["line"] for line in of_file]
    assert [row["text"] for row in answered] == [line.get("text") for line in of_file]
    assert [row["num_tokens"] for row in answered] == [line.get("num_tokens") for line in of_file]
    assert sum(row["error"] is not None for row in answered) == sum("error" in line for line in of_file) > 0


def test_columns_of_a_dataset_are_kept_and_missing_values_ignored(tmp_path: Path) -> None:
    tiny_chat_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    block = pyarrow.Table.from_pylist(
        [
            {"topic": "a", "prompt": "bread", "messages": None, "max_tokens": 3},
            {"topic": "b", "prompt": None, "messages": [{"role": "user", "content": "kiln"}]},
            {"topic": "c", "prompt": None, "messages": None},
        ]
    )
    settings = BatchSettings(model=str(tmp_path), params=SamplingParams(max_tokens=5))
    table = answer_block(block, settings=settings)
    assert table.column_names[:4] == ["topic", "prompt", "messages", "max_tokens"]
    assert [row["topic"] for row in table.to_pylist()] == ["a", "b", "c"]
    assert [row["num_tokens"] is not None for row in table.to_pylist()] == [True, True, False]
    assert "there is no prompt" in table.to_pylist()[2]["error"]


@pytest.mark.slow
def test_a_node_killed_in_the_middle_loses_nothing() -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray': `make test-ray`")
    done = subprocess.run(
        [sys.executable, "-m", "tests.local_backend.offline.ray_killed", "1000", "4"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
            "RAY_worker_niceness": "0",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["num_at_kill"] < 1000
    assert found["num_nodes"] == 1
    assert found["ids"] == list(range(1000))
    assert not found["errors"]
    assert all(isinstance(text, str) for text in found["texts"])
