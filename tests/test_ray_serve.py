"""The example for Ray Serve, started as its page says: `make test-ray`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.servers import ROOT, free_port

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("ray", reason="needs the extra 'ray': `make test-ray`")
    port = free_port()
    log: Path = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "examples/ray_serve.py"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PORT": str(port), "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 240
            while not _is_up(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"Ray Serve did not come up:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.parametrize("model", ["model", "model:sot"])
def test_answers_are_streamed(url: str, model: str) -> None:
    with OpenAI(base_url=url, api_key="none", timeout=240) as client:
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "How can I sleep better?"}],
            max_tokens=120,
            temperature=0,
            stream=True,
        )
        texts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len([text for text in texts if text]) > 3
    assert "sleep" in "".join(texts).lower()
