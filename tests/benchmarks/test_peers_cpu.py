"""All ways are compared on the same prompts; a peer that is not installed is left out with a reason."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers_cpu, peers_llama
from benchmarks.peer_process import PeerProcess
from benchmarks.peers import Task
from benchmarks.peers_gpu import DRAFTERS, GREEDY, LOOKUP
from local_backend.models.default_model import packaged_file
from tests.tiny import tiny_chat_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_chat_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def compared(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    peers_cpu.main(arguments.split())
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


@pytest.mark.parametrize(
    "kinds", [("edit",), pytest.param(("chat", "documents", "edit"), marks=pytest.mark.slow)], ids=len
)
def test_every_way_is_compared(
    kinds: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = f"--model {folder} --dtype bfloat16 --cases 1 --tokens 6 --seconds 0 --batches 1 2"
    common += f" --kinds {' '.join(kinds)}"
    results = compared(f"{common} --quantized-dtype bfloat16 --vllm-python nowhere", capsys)
    assert "nowhere" in results["absent"]["vLLM"]
    reason = results["absent"]["llama.cpp"]
    assert "llama" in reason or "GGUF" in reason  # which of the two is missing depends on `make peers`
    ours = [*DRAFTERS, *(f"{name}, int4" for name in DRAFTERS)]
    for kind in kinds:
        alone, together = results[f"{kind}, 1"], results[f"{kind}, 2"]
        assert list(alone) == [GREEDY, LOOKUP, *ours]
        assert list(together) == [GREEDY, *ours]  # there is no prompt lookup for batches
        for figures in (*alone.values(), *together.values()):
            assert figures["tokens_per_second"] > 0
            assert figures["first_token_ms"] > 0
            assert figures["memory_gib"] >= 0
        assert alone[GREEDY]["same_answers"] == 1.0
        assert set(results["ours_over"][f"{kind}, 1"]["tokens_per_second"]) == {GREEDY, LOOKUP}


def test_a_way_that_cannot_load_the_model_is_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path / "results")
    common = (
        f"--model {folder} --dtype float32 --cases 1 --tokens 4 --seconds 0 --batches 1 --kinds chat --peers"
    )
    results = compared(f"{common} --quantizations int3 --save", capsys)
    (kept,), (picture,) = ((tmp_path / "results").glob(f"*_peers_cpu.{end}") for end in ("json", "png"))
    assert json.loads(kept.read_text("utf-8"))["summary"] == results
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert set(results["absent"]) == {"llama.cpp", "vLLM", "ours, int3"}
    assert list(results["chat, 1"]) == [GREEDY, LOOKUP, *DRAFTERS]


@pytest.mark.slow
@pytest.mark.skipif(peers_llama.server_program() is None, reason="there is no llama-server: `make peers`")
@pytest.mark.parametrize("options", peers_llama.METHODS.values(), ids=["greedy", "prompt lookup"])
def test_llama_answers_and_its_times_add_up(options: tuple[str, ...]) -> None:
    program, model = peers_llama.server_program(), packaged_file()
    assert program is not None
    assert model is not None
    server = peers_llama.LlamaServer(
        program, model, num_threads=1, num_rows=2, num_positions=256, options=options
    )
    try:
        tasks = [Task(tuple(range(100, 120)), (), None, length) for length in (12, 20)]
        run = server(tasks)
        (short, long), again = run.token_ids, server(tasks)
        assert 0 < len(short) <= 12
        assert long[: len(short)] == short
        assert again.token_ids == run.token_ids
        assert 0 < run.decode_seconds < run.seconds
        assert 0 < run.num_forwards <= len(short) + len(long)
    finally:
        server.process.close()


def test_a_peer_and_its_children_are_stopped_while_it_is_not_their_turn() -> None:
    process = PeerProcess(["sh", "-c", "sleep 60 & cat"], replies=True)
    try:
        assert process.ask("one") == "one\n"
        assert len(process.states()) == 3
        deadline = time.monotonic() + 20  # a signal arrives when a busy machine comes to it
        while set(process.states()) != {"T"}:
            assert time.monotonic() < deadline, process.states()
        assert process.ask("two") == "two\n"
        assert process.resident_bytes() > 0
    finally:
        process.close()
    deadline = time.monotonic() + 20
    while not set(process.states()) <= {"Z"}:
        assert time.monotonic() < deadline, process.states()


def test_what_a_peer_wrote_before_it_ended_is_told() -> None:
    process = PeerProcess(["sh", "-c", "echo no memory >&2"], replies=True)
    try:
        with pytest.raises(RuntimeError, match="no memory"):
            process.ask("one")
    finally:
        process.close()


def test_why_llama_does_not_start_is_told(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho no such model >&2; exit 3\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match="no such model"):
        peers_llama.LlamaServer(program, tmp_path, num_threads=1, num_rows=1, num_positions=16)
