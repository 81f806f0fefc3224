"""llama.cpp as a peer: its own server in a process of its own, asked with token ids.

The server is ``.llama/bin/llama-server``, which ``make peers`` builds for this processor, or the one on the
path. What it remembers of earlier prompts is off, as it is for all peers. Its prompt lookup is the drafter
``ngram-simple`` with the lengths that ``transformers`` documents for its own.

Knows the server's wire. Does not know models: it is given a GGUF file.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.peer_process import PeerProcess
from benchmarks.peers import PROMPT_LOOKUP_TOKENS, Run, Task

ROOT = Path(__file__).parents[1]
METHODS: dict[str, tuple[str, ...]] = {
    "llama.cpp greedy": (),
    "llama.cpp prompt lookup": (
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2"),
        *("--spec-ngram-simple-size-m", str(PROMPT_LOOKUP_TOKENS)),
    ),
}
"""Options of the server for each method."""
_START_SECONDS = 120


def server_program() -> Path | None:
    """``llama-server``: the one built here, else the one on the path."""
    found = shutil.which("llama-server", path=ROOT / ".llama" / "bin") or shutil.which("llama-server")
    return Path(found) if found else None


class LlamaServer:
    """A running server, which is a way to decode: tasks in, a :class:`~benchmarks.peers.Run` out.

    Args:
        program: ``llama-server``.
        model: A GGUF file.
        num_threads: Of every forward.
        num_rows: Answers at a time.
        num_positions: Of a prompt and its answer.
        options: Further options of the server.

    Raises:
        RuntimeError: The server did not start; the message ends with what it wrote.
    """

    def __init__(
        self,
        program: Path,
        model: Path,
        *,
        num_threads: int,
        num_rows: int,
        num_positions: int,
        options: Sequence[str] = (),
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        settings = {
            "model": model,
            "port": port,
            "threads": num_threads,
            "threads-batch": num_threads,
            "parallel": num_rows,
            "ctx-size": num_rows * num_positions,
            "cache-ram": 0,
        }
        command = [str(program), *options]
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        self.process = PeerProcess(command)
        try:
            self._wait_until_ready()
        except RuntimeError:
            self.process.close()
            raise

    def __call__(self, tasks: Sequence[Task]) -> Run:
        """Answer all tasks at once."""
        with self.process.turn():
            started = time.perf_counter()
            with ThreadPoolExecutor(len(tasks)) as pool:
                answers = list(pool.map(self._answer, tasks))
        ended = max(ended for _, ended in answers)
        timings = [answer["timings"] for answer, _ in answers]
        first = max(
            ended - timing["predicted_ms"] / 1e3 for timing, (_, ended) in zip(timings, answers, strict=True)
        )
        token_ids = tuple(tuple(answer["tokens"]) for answer, _ in answers)
        num_tokens = sum(map(len, token_ids))
        return Run(
            token_ids,
            ended - started,
            ended - first,
            num_tokens - len(tasks),
            num_tokens - sum(timing.get("draft_n_accepted", 0) for timing in timings),
        )

    def _answer(self, task: Task) -> tuple[dict[str, Any], float]:
        """The server's answer, and when it came."""
        answer = self._ask(
            "completion",
            {
                "prompt": task.prompt,
                "n_predict": task.num_tokens,
                "temperature": 0.0,
                "samplers": ["temperature"],
                "cache_prompt": False,
                "return_tokens": True,
            },
        )
        return answer, time.perf_counter()

    def _ask(self, path: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = None if request is None else json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self._url}/{path}", data=data, headers=headers)
        with urllib.request.urlopen(asked) as reply:
            return dict(json.load(reply))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self.process.has_ended:
                raise RuntimeError(f"llama-server has ended: {self.process.last_words()}")
            try:
                self._ask("health")
            except OSError:  # not listening yet, or 503 while it loads
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"llama-server was not ready after {_START_SECONDS} s")
