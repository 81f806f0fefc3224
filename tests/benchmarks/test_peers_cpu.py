"""All ways are compared on the same prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import peers_cpu
from benchmarks.peers_gpu import DRAFTERS, GREEDY, LOOKUP
from tests.tiny import tiny_chat_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_chat_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_every_way_is_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers_cpu.main(f"--model {folder} --cases 1 --tokens 6 --seconds 0".split())
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(results) == {"chat", "documents", "edit"}
    for ways in results.values():
        assert list(ways) == [GREEDY, LOOKUP, *DRAFTERS, *(f"{name}, int4" for name in DRAFTERS)]
        for figures in ways.values():
            assert figures["tokens_per_second"] > 0
            assert figures["first_token_ms"] > 0
        assert ways[GREEDY]["same_answers"] == 1.0
