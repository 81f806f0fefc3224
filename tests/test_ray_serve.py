"""The example for Ray Serve, started as its page says: `make test-ray`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.servers import ROOT, free_port, started

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("ray", reason="needs the extra 'ray': `make test-ray`")
    port = free_port()
    environment = {
        **os.environ,
        **{"PYTHONPATH": str(ROOT), "PORT": str(port), "RAY_USAGE_STATS_ENABLED": "0"},
        "RAY_worker_niceness": "0",  # else the replica waits for whatever else runs here
    }
    with started(
        [sys.executable, "examples/ray_serve.py"],
        f"http://127.0.0.1:{port}/health",
        tmp_path_factory.mktemp("serve") / "log",
        environment,
        timeout_seconds=240,
        stop=signal.SIGINT,  # at which Ray ends what it has started
    ):
        yield f"http://127.0.0.1:{port}/v1"


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
