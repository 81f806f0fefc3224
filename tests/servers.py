"""Real servers of other people, started on loopback for the tests that need them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def transformers_serve(
    model: Path, scratch: Path, *options: str, timeout_seconds: float = 120
) -> Iterator[str]:
    """``transformers serve`` hosting ``model``; yields the base URL of its OpenAI-compatible API."""
    port = free_port()
    (scratch / "hub").mkdir(parents=True, exist_ok=True)
    command = [
        str(Path(sys.executable).parent / "transformers"),
        "serve",
        str(model),
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu"),
        *options,
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch), "PYTHONPATH": str(ROOT)}
    log = scratch / "serve.log"
    api = f"http://127.0.0.1:{port}/v1"
    with started(command, f"{api}/models", log, environment, timeout_seconds=timeout_seconds):
        yield api


@contextmanager
def started(
    command: Sequence[str],
    url: str,
    log: Path,
    environment: Mapping[str, str],
    *,
    timeout_seconds: float,
    stop: signal.Signals = signal.SIGTERM,
) -> Iterator[None]:
    """Runs ``command`` until the end of the block, which begins once ``url`` answers."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + timeout_seconds
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[:3]} did not come up:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)  # between two questions whether it is up, until the deadline
            yield
        finally:
            process.send_signal(stop)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


@contextmanager
def vllm_serve(python: str, model: Path, scratch: Path, *, timeout_seconds: float = 400) -> Iterator[int]:
    """vLLM hosting ``model`` as "default", from a separate environment; yields its port."""
    port = free_port()
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "default", "--enforce-eager"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--dtype", "float32"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    models, log = f"http://127.0.0.1:{port}/v1/models", scratch / "vllm.log"
    with started(command, models, log, {**os.environ, **offline}, timeout_seconds=timeout_seconds):
        yield port


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


AIMOCK = ROOT / ".node" / "node_modules" / "@copilotkit" / "aimock"


@dataclass
class Aimock:
    """A running aimock; see tests/aimock.mjs for what it answers."""

    port: int

    @property
    def openai_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def anthropic_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stats(self) -> dict[str, Any]:
        """Requests seen, faults drawn, tokens counted in replies that were meant to end well."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/__stats", timeout=10) as response:
            return dict(json.load(response))

    def num_open(self) -> int:
        """Replies being written."""
        return int(self.stats()["open"])


@contextmanager
def aimock(**options: Any) -> Iterator[Aimock]:
    """The npm package ``@copilotkit/aimock``. Skips where it or Node is missing, unless it must not."""
    node = shutil.which("node")
    if node is None or not AIMOCK.exists():
        missing = "Node is" if node is None else f"{AIMOCK.relative_to(ROOT)} is"
        reason = f"{missing} not here: install Node 20 and run `make .node/installed`"
        if os.environ.get("AIMOCK_REQUIRED"):
            pytest.fail(reason)
        pytest.skip(reason)
    command = [node, str(ROOT / "tests" / "aimock.mjs"), str(AIMOCK), json.dumps(options)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Aimock(int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


@dataclass
class Cutter:
    """Stands between a client and a real server and cuts connections in the middle of a reply.

    Attributes:
        after_bytes: How much of a reply is let through, one number for each connection to come; connections
            beyond them are left alone.
    """

    upstream_port: int
    after_bytes: list[int] = field(default_factory=list)
    num_cut: int = 0
    _listener: socket.socket = field(default_factory=socket.socket)

    def __post_init__(self) -> None:
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                bound = self.after_bytes.pop(0) if self.after_bytes else None
                threading.Thread(target=self._serve, args=(client, bound), daemon=True).start()

    def _serve(self, client: socket.socket, bound: int | None) -> None:
        with client, socket.create_connection(("127.0.0.1", self.upstream_port)) as server:
            back = threading.Thread(target=self._copy, args=(client, server), daemon=True)
            back.start()
            num_bytes = 0
            with suppress(OSError):
                while data := server.recv(4096):
                    if bound is not None and num_bytes + len(data) > bound:
                        client.sendall(data[: bound - num_bytes])
                        self.num_cut += 1
                        break
                    client.sendall(data)
                    num_bytes += len(data)
            for end in (client, server):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            back.join(5)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)


@contextmanager
def cutter(upstream_port: int, after_bytes: list[int]) -> Iterator[Cutter]:
    """A :class:`Cutter` in front of a server on loopback."""
    running = Cutter(upstream_port, after_bytes)
    try:
        yield running
    finally:
        running.close()
