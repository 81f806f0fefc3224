"""``sot ask`` and the comparison it shows."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from langchain_parallel_decoding.command import main
from sot_chains.cli import run
from sot_chains.display import compare, printable
from sot_chains.serving import Copying, Extras
from tests.sot_chains.fakes import PLAIN, QUESTION, PacedChatModel, sot_of
from tests.sot_chains.server import MODEL, ChatServer, chat_server, unused_url

CONTROL_CHARACTERS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


def test_piped(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", QUESTION, "--model", f"openai:{MODEL}", "--base-url", server.url]) == 0
    out, err = capsys.readouterr()
    assert not CONTROL_CHARACTERS.search(out)
    assert max(len(line) for line in out.splitlines() if "│" in line) <= 100
    assert PLAIN in out
    assert "2. **Dark room**: Close the curtains." in out
    for heading in ("seconds", "tokens", "first text", "critical path", "speed-up"):
        assert heading in out
    assert re.search(r"Plain decoding +│ +\d+\.\d\d │ +10 │", out)
    assert re.search(r"Skeleton-of-Thought +│ +\d+\.\d\d │ +21 │", out)
    assert err == ""


def test_colours_are_not_forced_into_a_pipe(
    server: ChatServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["ask", QUESTION, "--no-plain", "--model", f"openai:{MODEL}", "--base-url", server.url]) == 0
    out = capsys.readouterr().out
    assert not CONTROL_CHARACTERS.search(out)
    assert PLAIN not in out
    assert "Plain decoding" not in out
    assert "critical path" in out


@pytest.mark.parametrize("model", ["openai:large-9", "down"])
def test_a_model_that_cannot_be_asked_is_one_line(
    server: ChatServer, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    url = unused_url() if model == "down" else server.url
    assert (
        main(["ask", QUESTION, "--model", f"openai:{model.removeprefix('openai:')}", "--base-url", url]) == 1
    )
    err = capsys.readouterr().err
    assert err.startswith("sot: ")
    assert err.count("\n") == 1
    assert url in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ask", " ", "--model", "openai:m"], "the question is empty"),
        (["ask", QUESTION, "--model", "nobody:m"], "supported is"),
        (["ask", QUESTION, "--model", "python:no_such.thing"], "No module named"),
        (["ask", QUESTION, "--model", "openai:m", "--api-key-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_the_key_comes_from_the_variable_named(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    server.key = "s3cret"
    arguments = [
        "ask",
        QUESTION,
        "--model",
        f"openai:{MODEL}",
        *("--base-url", server.url, "--profile", "strong"),
        *("--api-key-env", "MY_KEY"),
    ]
    assert main(arguments) == 0


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "langchain_parallel_decoding.command", "ask", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--no-plain" in done.stdout


async def test_the_table_compares_what_both_took() -> None:
    model = PacedChatModel(pause=0.001)
    out = io.StringIO()
    console = Console(file=out, width=100)
    plain, sot = await compare(model, QUESTION, console=console)
    assert plain is not None
    plain_seconds, seconds = (message.response_metadata["sot"]["seconds"] for message in (plain, sot))
    rows = [line.split("│") for line in out.getvalue().splitlines() if line.startswith("│ ")]
    assert [row[6].strip() for row in rows] == ["1.00x", f"{plain_seconds / seconds:.2f}x"]
    assert out.getvalue().startswith(f"Question: {QUESTION}\n")
    assert not CONTROL_CHARACTERS.search(out.getvalue())


async def test_an_answer_that_was_plain_after_all_is_said_to_be() -> None:
    out = io.StringIO()
    model = PacedChatModel(answer=lambda _: PLAIN)
    _, message = await compare(sot_of(model), QUESTION, console=Console(file=out, width=100))
    assert message.response_metadata["sot"]["route"] == "plain"
    assert "Route: answered plainly; the skeleton has no usable points" in " ".join(out.getvalue().split())
    assert not re.search(r"\d+\.\d\dx", out.getvalue())  # there is nothing to compare


async def test_a_pipe_gets_the_text_while_it_is_written() -> None:
    seen = []

    class Pipe(io.StringIO):
        def flush(self) -> None:
            seen.append((self.getvalue(), model.num_running))

    model = PacedChatModel(pause=0.001)
    await compare(model, QUESTION, console=Console(file=Pipe(), width=100), plain=False)
    assert any("Go to bed" in text and running for text, running in seen)


async def test_on_a_terminal_both_grow_and_stay() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, height=40, force_terminal=True, color_system=None)
    await compare(PacedChatModel(pause=0.02), QUESTION, console=console)
    shown = out.getvalue()
    assert shown.count("Plain decoding") > 3  # frames
    final = shown.rpartition("\x1b[?25h")[2]
    assert "Drink none after noon." in final


def test_answers_do_not_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07c\n[red]\x9b") == "a[2Jbc\n[red]"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "latin-1"])
def test_an_answer_is_written_in_any_encoding(encoding: str) -> None:
    with chat_server() as server:
        server.answer = lambda messages: "1. Größe: 早安 😀\n2. Grüße"
        command = [sys.executable, "-m", "langchain_parallel_decoding.command", "ask", QUESTION]
        done = subprocess.run(
            [*command, "--model", f"openai:{MODEL}", "--base-url", server.url],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")
    out = done.stdout.decode(encoding)
    assert "Gr" in out
    assert "?" in out
    assert "Skeleton-of-Thought" in out


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded: list[str | None] = []
    devices: list[object] = []

    def load(path: str | None, *, device: str) -> PacedChatModel:
        loaded.append(path)
        devices.append(device)
        return PacedChatModel()

    extras = Extras(load, lambda model, docs: Copying(lambda text, documents: []))
    for name in ("~/model.gguf", "local:~/model.gguf", "default", "local:", "org/name"):
        assert run(["ask", QUESTION, "--no-plain", "--model", name], extras) == 0
    assert run(["ask", QUESTION, "--no-plain", "--device", "cuda:1"], extras) == 0
    assert devices == ["auto"] * 5 + ["cuda:1"]
    assert loaded.pop() is None
    assert loaded == [str(tmp_path / "model.gguf")] * 2 + [None, None, "org/name"]
    (tmp_path / "questions.jsonl").write_text('{"question": "Why?", "category": "x"}\n')
    assert run(["eval", "~/questions.jsonl", "--out", "~/report", "--router", "none"], extras) == 0
    assert (tmp_path / "report" / "report.md").exists()
