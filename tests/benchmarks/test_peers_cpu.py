"""All ways that can run here are compared on the same prompts; what is left out says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import peers_cpu
from benchmarks.peers import Task
from benchmarks.peers_gpu import DRAFTERS, GREEDY, LOOKUP
from tests.tiny import tiny_chat_model, tiny_tokenizer

# What llama.cpp's process says, by a few lines that read the same requests.
_WORKER = """
import json, sys
print(json.dumps({"is_ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    ids = request["prompt"][: request["num_tokens"]]
    answer = {"token_ids": ids, "decode_seconds": 0.001, "num_tokens": len(ids), "resident_bytes": 2**30}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_chat_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_every_way_is_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers_cpu.main(f"--model {folder} --cases 1 --tokens 6 --seconds 0".split())
    *table, line = capsys.readouterr().out.splitlines()
    results = json.loads(line)
    assert results.pop("left_out") == {"llama.cpp": "the model is not a GGUF file"}
    assert "llama.cpp is left out: the model is not a GGUF file" in table
    assert set(results) == {"chat", "documents", "edit"}
    for ways in results.values():
        assert list(ways) == [GREEDY, LOOKUP, *DRAFTERS, *(f"{name}, int4" for name in DRAFTERS)]
        for figures in ways.values():
            assert figures["tokens_per_second"] > 0
            assert figures["first_token_ms"] > 0
        assert ways[GREEDY]["same_answers"] == 1.0


def test_llama_cpp_is_asked_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(_WORKER)
    monkeypatch.setattr(peers_cpu, "_WORKER", worker)
    found = peers_cpu.Contestants()
    found.add_llama_cpp(tmp_path / "model.gguf", Path(sys.executable), Task((5, 6, 7), (), None, 2))
    run = found.ways["llama.cpp"]([Task((8, 9), (), None, 4)])
    assert run.token_ids == ((8, 9),)
    assert run.num_decoded == 1
    assert run.seconds > 0
    assert found.memory_gib == {"llama.cpp": 1.0, "llama.cpp prompt lookup": 1.0}
    found.close()


def test_a_process_that_ends_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit(3)")
    monkeypatch.setattr(peers_cpu, "_WORKER", worker)
    with pytest.raises(RuntimeError, match="ended with 3"):
        peers_cpu.LlamaCpp(Path(sys.executable), tmp_path / "model.gguf", is_lookup=False)


def test_without_its_environment_llama_cpp_is_left_out(tmp_path: Path) -> None:
    found = peers_cpu.Contestants()
    found.add_llama_cpp(tmp_path / "model.gguf", tmp_path / "no-python", Task((5,), (), None, 2))
    assert found.left_out == {"llama.cpp": "its environment is missing: make peers"}
    assert not found.ways
