"""Real servers of other people, started on loopback for the tests that need them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + timeout_seconds
            while not _answers(f"http://127.0.0.1:{port}/v1/models"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"transformers serve did not come up:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
