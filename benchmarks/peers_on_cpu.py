"""The ways to decode on a CPU that are compared: ours, ``transformers``, llama.cpp and vLLM.

Loads models, starts the peers' processes, lets each answer once, and notes how much memory each takes and why
a peer is absent. Does not measure time.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from benchmarks import peers_llama, vllm_worker
from benchmarks.peer_process import PeerProcess
from benchmarks.peers import PROMPT_LOOKUP_TOKENS, Run, Task, aside
from benchmarks.peers_gpu import DRAFTERS, GREEDY, LOOKUP, Way, run_ours, run_peer
from local_backend import Engine
from local_backend.models.default_model import packaged_file
from local_backend.models.loading import load

_NUM_POSITIONS = 2048  # of a prompt and its answer, for peers that reserve a cache


class Peer(Protocol):
    """A way to decode in a process of its own."""

    process: PeerProcess

    def __call__(self, tasks: Sequence[Task]) -> Run:
        """Answer all tasks at once."""


@dataclass
class Contestants:
    """The ways to decode, and what they need.

    Attributes:
        ways: By name, the baseline first.
        memory_gib: By name.
        absent: Reasons, by the name of what was left out.
    """

    warm_up: Sequence[Task]
    max_rows: int
    ways: dict[str, Way] = field(default_factory=dict)
    memory_gib: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def add_transformers(self, options: argparse.Namespace) -> Path:
        """``model.generate`` on a model of its own, which no engine changes; returns the model's folder."""
        before = _resident_bytes()
        model, tokenizer = aside(partial(load, options.model, dtype=options.dtype))
        self._add(
            {
                GREEDY: partial(run_peer, model, tokenizer),
                LOOKUP: partial(run_peer, model, tokenizer, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
            },
            before,
        )
        return vllm_worker.folder_of(options.model, model.dtype)

    def add_ours(self, model_name: str | None, dtype: str, quantization: str | None) -> None:
        """An engine for each drafter."""
        before = _resident_bytes()
        try:
            model, tokenizer = aside(partial(load, model_name, dtype=dtype, quantization=quantization))
        except ValueError as error:
            self.absent[f"ours, {quantization}"] = str(error)
            return
        ways: dict[str, Way] = {}
        for drafter in DRAFTERS:
            engine = aside(partial(Engine, model, tokenizer, drafter, max_prefix_bytes=0))
            self._stack.callback(engine.close)
            ways[f"{drafter}, {quantization}" if quantization else drafter] = partial(run_ours, engine)
        self._add(ways, before)

    def add_processes(self, peer: str, start: Mapping[str, Callable[[], Peer]]) -> None:
        """A process for each method of a peer, all started before the first is waited for."""
        try:
            processes: dict[str, Peer] = {}
            for name, begin in start.items():
                processes[name] = begin()
                self._stack.callback(processes[name].process.close)
        except RuntimeError as error:
            self.absent[peer] = str(error)
            return
        for name, process in processes.items():
            try:
                self._warm(process)
            except RuntimeError as error:
                self.absent[name] = str(error)
                continue
            self.ways[name] = process
            self.memory_gib[name] = round(process.process.resident_bytes() / 2**30, 2)

    def close(self) -> None:
        """End engines and processes."""
        self._stack.close()

    def _add(self, ways: dict[str, Way], before: int) -> None:
        """Add ways that share a model, loaded when this process had ``before`` bytes."""
        for name, way in ways.items():
            self._warm(way, alone=name == LOOKUP)
        grown = max(0, _resident_bytes() - before) / 2**30  # the process may have given memory back meanwhile
        self.ways.update(ways)
        self.memory_gib.update(dict.fromkeys(ways, round(grown, 2)))

    def _warm(self, way: Way, *, alone: bool = False) -> None:
        way(self.warm_up[:1])
        if self.max_rows > 1 and not alone:
            way(self.warm_up)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


@contextmanager
def contestants(options: argparse.Namespace, warm_up: Sequence[Task]) -> Iterator[Contestants]:
    """All ways that can run here."""
    found = Contestants(warm_up, max(options.batches))
    sizes: dict[str, Any] = {
        "num_threads": torch.get_num_threads(),
        "num_rows": found.max_rows,
        "num_positions": _NUM_POSITIONS,
    }
    try:
        folder = found.add_transformers(options)
        if reason := _why_no_llama(options):
            found.absent["llama.cpp"] = reason
        else:
            program, gguf = cast("Path", peers_llama.server_program()), cast("Path", gguf_of(options))
            found.add_processes(
                "llama.cpp",
                {
                    name: partial(peers_llama.LlamaServer, program, gguf, options=extra, **sizes)
                    for name, extra in peers_llama.METHODS.items()
                },
            )
        if reason := _why_no_vllm(options):
            found.absent["vLLM"] = reason
        else:
            python = Path(options.vllm_python)
            start = partial(vllm_worker.VllmProcess, python, folder, dtype=_dtype_in(folder), **sizes)
            found.add_processes("vLLM", {name: partial(start, name) for name in vllm_worker.METHODS})
        found.add_ours(options.model, options.dtype, None)
        for quantization in options.quantizations:
            found.add_ours(options.model, options.quantized_dtype, quantization)
        yield found
    finally:
        found.close()


def gguf_of(options: argparse.Namespace) -> Path | None:
    """The file that llama.cpp loads, if there is one."""
    if options.gguf:
        return Path(options.gguf)
    if options.model is None:
        return packaged_file()
    return Path(options.model) if Path(options.model).is_file() else None


def _why_no_llama(options: argparse.Namespace) -> str | None:
    if "llama.cpp" not in options.peers:
        return "not asked for"
    if peers_llama.server_program() is None:
        return "there is no llama-server in .llama/bin, where `make peers` builds it, nor on the path"
    if gguf_of(options) is None:
        return "it needs the model as a GGUF file: give --gguf"
    return None


def _why_no_vllm(options: argparse.Namespace) -> str | None:
    if "vLLM" not in options.peers:
        return "not asked for"
    if not Path(options.vllm_python).exists():
        return f"there is no {options.vllm_python}: `make peers` installs it"
    return None


def _dtype_in(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return str(config.get("dtype") or config["torch_dtype"])
