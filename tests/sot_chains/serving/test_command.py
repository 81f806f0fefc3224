"""``sot serve`` as a process, as people start it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from langchain_parallel_decoding.command import main
from tests.sot_chains.fakes import ANSWER, QUESTION
from tests.sot_chains.server import MODEL, chat_server, unused_url

ROOT = Path(__file__).parents[3]
ASKED: Any = [{"role": "user", "content": QUESTION}]


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[str]:
    """Runs ``sot serve`` on a free port; interrupts it at the end, as Ctrl-C does."""
    command = [
        sys.executable,
        "-m",
        "langchain_parallel_decoding.command",
        "serve",
        "--port",
        "0",
        *arguments,
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stderr
    try:
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + process.stderr.read()
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 0, said
    assert re.sub("Loading weights:.*", "", said).strip() == ""  # the progress bar of a local model


def test_it_serves_a_vendors_model_and_a_folder_until_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "hours.txt").write_text("The shop opens at nine.")
    with chat_server() as upstream:
        upstream.key = "ours"
        arguments = ("--model", f"openai:{MODEL}", "--base-url", upstream.url, "--docs", str(tmp_path))
        with serving(*arguments, "--profile", "small", "--api-key", "theirs", OPENAI_API_KEY="ours") as url:
            headers = {"authorization": "Bearer theirs"}
            names = [one["id"] for one in httpx.get(f"{url}/v1/models", headers=headers).json()["data"]]
            assert names == [MODEL, f"{MODEL}:sot", f"{MODEL}:auto", f"{MODEL}:copy"]
            body = {"model": f"{MODEL}:sot", "messages": ASKED}
            answered = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            assert answered.json()["choices"][0]["message"]["content"] == ANSWER
            assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 401
            assert set(httpx.get(f"{url}/about").json()["lanes"]) == {"plain", "sot", "copy"}


def annotations(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answered = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    return list(answered["choices"][0]["message"]["annotations"])


@pytest.mark.slow
def test_it_serves_the_default_model_with_references() -> None:
    text = "Store hours: Monday to Friday from nine to six, on Saturday from ten to two."
    with serving("--docs", "examples/pottery") as url:
        name = httpx.get(f"{url}/health").json()["model"]
        asked = [{"role": "user", "content": f"Repeat this text word for word: {text}"}]
        body = {"model": name, "messages": asked, "references": [text], "max_tokens": 60}
        (citation,) = annotations(url, body)
        assert citation["url_citation"]["cited_text"] in text
        body = {"model": f"{name}:copy", "messages": [{"role": "user", "content": "Who may open the kiln?"}]}
        assert isinstance(annotations(url, body), list)  # whether it quotes the folder is the model's choice


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--port", "70000"], 2, "--port must be"),
        (["--model", "openai:"], 2, "has no name"),
        (["--model", "openai:x", "--api-key", "k"], 2, "OPENAI_API_KEY"),
        (
            ["--model", "openai:x", "--base-url", unused_url(), "--docs", "nowhere"],
            1,
            "not a folder",
        ),
        (["--model", "openai:x", "--api-key-env", "NOT_SET"], 2, "NOT_SET"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        sys.exit(main(["serve", *arguments]))
    assert left.value.code == code
    assert says in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", "openai:x", "--base-url", unused_url(), "--port", port]) == 1
    assert "already in use" in capsys.readouterr().err
