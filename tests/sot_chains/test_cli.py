"""``sot ask`` and the comparison it shows."""

import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from langchain_parallel_decoding.command import main
from local_backend import find_model
from sot_chains.cli import run
from sot_chains.display import compare, printable
from sot_chains.serving import Copying, Extras
from tests.sot_chains.fakes import PLAIN, QUESTION, PacedChatModel, sot_of
from tests.sot_chains.server import MODEL, ChatServer, chat_server, unused_url

NO_LOADING = Extras(
    lambda path, **options: pytest.fail("a model was loaded"),
    lambda model, docs: pytest.fail("references were made"),
    find_local=find_model,
)
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
        (["no-such-command"], "COMMAND"),
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


def test_without_a_command_it_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    examples = [shlex.split(line) for line in out.splitlines() if line.startswith("  sot ")]
    assert {words[1] for words in examples} == {"ask", "serve"}
    assert len(examples) == 3


def test_scripts_get_json_or_the_text_alone(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["ask", QUESTION, "--model", f"openai:{MODEL}", "--base-url", server.url]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == MODEL
    assert told["plain"]["text"] == PLAIN
    assert told["sot"]["text"].startswith("1. ")
    assert told["sot"]["usage"]["output_tokens"] > 0
    assert main([*asked, "--quiet"]) == 0
    assert capsys.readouterr() == (told["sot"]["text"] + "\n", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--port", "0", "--docs", "no-such-folder"], "no-such-folder is not a folder"),
        (["serve", "--port", "TAKEN"], "in use"),
        (["serve", "--port", "65536"], "--port must be from 0 to 65535"),
        (["eval", "no-such-file"], "no-such-file"),
        (["eval", "no-such-file", "--limit", "0"], "--limit must be at least 1"),
    ],
)
def test_what_needs_no_model_is_checked_before_one_is_loaded(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(path: str | None, **options: object) -> PacedChatModel:
        raise AssertionError("the model was loaded first")

    extras = Extras(load, lambda model, docs: Copying(lambda text, documents: []))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [one.replace("TAKEN", str(taken.getsockname()[1])) for one in arguments]
        with suppress(SystemExit):  # wrong arguments
            assert run(given, extras) == 1
    err = capsys.readouterr().err
    assert says in err
    assert not err.startswith("usage") or f"usage: sot {arguments[0]}" in err


@pytest.mark.parametrize("name", ["foo", "local:foo", "nobody/has-this-model"])
def test_a_name_that_is_neither_here_nor_on_the_hub_fails_before_loading(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ask", QUESTION, "--model", name], NO_LOADING) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"sot: {name.removeprefix('local:')} is not on this machine")
    assert "local:NAME" in err
    assert "openai:NAME" in err


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


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("cp1252", marks=pytest.mark.slow)])
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
    (tmp_path / "model.gguf").touch()
    for name in ("~/model.gguf", "local:~/model.gguf", "default", "local:"):
        assert run(["ask", QUESTION, "--no-plain", "--model", name], extras) == 0
    assert run(["ask", QUESTION, "--no-plain", "--device", "cuda:1"], extras) == 0
    assert devices == ["auto"] * 4 + ["cuda:1"]
    assert loaded.pop() is None
    assert loaded == [str(tmp_path / "model.gguf")] * 2 + [None, None]
    (tmp_path / "questions.jsonl").write_text('{"question": "Why?", "category": "x"}\n')
    assert run(["eval", "~/questions.jsonl", "--out", "~/report", "--router", "none"], extras) == 0
    assert (tmp_path / "report" / "report.md").exists()


@pytest.mark.parametrize("command", [["ask", QUESTION], ["eval", "QUESTIONS"], ["serve", "--port", "0"]])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--model", "openai:m", "--base-url", "127.0.0.1:8000/v1"], "expected http://HOST:PORT/v1"),
        (["--model", "openai:m", "--base-url", "http://h/v1/chat/completions"], "without /chat/completions"),
        (["--model", "openai:m", "--api-key-env", "NOT_SET"], "NOT_SET named by --api-key-env is not set"),
        (["--model", "openai:"], 'write "openai:MODEL"'),
        (["--model", "nobody:m"], 'supported is "openai:MODEL"'),
        (["--model", "python:no_such.thing"], "expected python:PACKAGE.FUNCTION"),
        (["--base-url", "http://127.0.0.1:8000/v1"], "needs the name of a model there"),
    ],
)
def test_a_model_that_cannot_be_meant_is_refused_before_any_is_loaded(
    command: list[str], given: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "questions").write_text('{"question": "Why?"}\n')
    command = [one.replace("QUESTIONS", str(tmp_path / "questions")) for one in command]
    with pytest.raises(SystemExit) as caught:
        run([*command, *given, *(["--out", str(tmp_path)] if command[0] == "eval" else [])], NO_LOADING)
    assert caught.value.code == 2
    usage, _, error = capsys.readouterr().err.partition("error: ")
    assert says in error
    assert usage.startswith(f"usage: sot {command[0]}")


def test_all_models_are_checked_before_the_first_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "questions").write_text('{"question": "Why?"}\n')
    asked = ["eval", str(tmp_path / "questions"), "--out", str(tmp_path), "--model", "default"]
    for other in ("--model", "--judge"):
        with pytest.raises(SystemExit):
            run([*asked, other, "openai:m"], NO_LOADING)
        assert "set OPENAI_API_KEY, or name another variable by --api-key-env" in capsys.readouterr().err
