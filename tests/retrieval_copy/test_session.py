"""The conversation in the terminal: over a pipe, and on a real pseudo-terminal with the default model."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pexpect
import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from rich.console import Console

from retrieval_copy import RetrievalCopyChain
from retrieval_copy.cli import Session, line_reader
from tests.retrieval_copy.fakes import CLAY, GLAZE, QUESTION, QuotingModel, retriever

ROOT = Path(__file__).parents[2]
MANUAL = Document(
    "Wear gloves. The kiln may be opened once the cone reads eighty degrees, and never while it glows. Wait.",
    id="manual",
    metadata={"source": "manual.pdf", "page": 12},
)


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=100, highlight=False)


def reader(*lines: str | type[BaseException]) -> Callable[[], str]:
    rest: Iterator[Any] = iter(lines)

    def read() -> str:
        line = next(rest, EOFError)
        if isinstance(line, type):
            raise line
        return str(line)

    return read


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_footnotes_name_file_and_page_and_show_their_passage(console: Console) -> None:
    chain = RetrievalCopyChain(retriever(MANUAL, GLAZE), QuotingModel())
    Session(chain, console).run(reader(QUESTION, "1", "[2]", "3", "", "?"))
    text = shown(console)
    answer, _, rest = text.partition("\n\n")
    marks = re.findall(r"\[(\d+)\]", answer)
    assert marks == ["1", "2"]
    assert "[1] manual.pdf, page 12, also in glaze.md:" in rest or "[1] manual.pdf, page 12:" in rest
    assert "[2] glaze.md" in rest
    joined = " ".join(rest.split())
    assert "Wear gloves. The kiln may be opened once the >>>cone reads eighty degrees, and never" in joined
    assert "glows. Wait.<<< " in joined
    assert "no footnote [3]: the last answer has 2" in rest
    assert "q leaves" in rest
    assert "\x1b" not in text


def test_a_follow_up_has_the_conversation_before_it(console: Console) -> None:
    model = QuotingModel()
    queries: list[str] = []

    def search(query: str) -> list[Document]:
        queries.append(query)
        return [CLAY]

    session = Session(RetrievalCopyChain(RunnableLambda(search), model), console)
    session.run(reader("What about clay?", "And when may it be opened?"))
    assert queries == ["What about clay?", "What about clay? And when may it be opened?"]
    assert any("What about clay?" in message.text for message in model.requests[-1])


def test_what_fails_or_is_stopped_does_not_end_the_session(console: Console) -> None:
    async def search(query: str) -> list[Document]:
        if "fail" in query:
            raise ConnectionError("no route to the store")
        if "stop" in query:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # as Ctrl-C does
            await asyncio.sleep(60)
        return [CLAY]

    model = QuotingModel()
    session = Session(RetrievalCopyChain(RunnableLambda(search), model), console)
    session.run(reader("Please fail", KeyboardInterrupt, "Please stop", "1", QUESTION, "quit", "never read"))
    text = shown(console)
    assert "no route to the store" in text
    assert "(q leaves)" in text
    assert "(stopped)" in text
    assert "no footnote [1]: the last answer has none" in text
    assert len(model.requests) == 1, "neither is part of the conversation"
    assert "clay.html" in text


def test_a_pipe_is_read_to_its_end(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(f"{QUESTION}\n1\n"))
    session = Session(RetrievalCopyChain(retriever(MANUAL), QuotingModel()), console)
    session.run(line_reader(console))
    text = shown(console)
    assert text.startswith(f"> {QUESTION}\n")
    assert text.count("It is written:") == 1
    assert ">>>cone reads" in text


# A session as the command begins it, with a model that takes its time and quotes.
_SESSION = """
import asyncio
from rich.console import Console
from retrieval_copy import RetrievalCopyChain
from retrieval_copy.cli import Session, line_reader
from tests.retrieval_copy.fakes import GLAZE, QuotingModel, retriever

class SlowModel(QuotingModel):
    async def _astream(self, *args, **kwargs):
        await asyncio.sleep(0.5)  # time to press a key
        async for chunk in super()._astream(*args, **kwargs):
            yield chunk

console = Console(highlight=False)
session = Session(RetrievalCopyChain(retriever(GLAZE), SlowModel(), min_citation_tokens=3), console)
session.take("?")
session.run(line_reader(console))
"""


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_a_terminal_answers_stream_footnotes_open_and_control_keys_work(
    is_real: bool, tmp_path: Path
) -> None:
    """The terminal and the process are real, with ``is_real`` the folder, its index and the model, too."""
    command, asked = ["-c", _SESSION], QUESTION
    if is_real:
        command = ["-m", "retrieval_copy", str(ROOT / "examples" / "pottery"), "--store", "bm25"]
        command += ["--index", str(tmp_path), "--max-tokens", "60", "--min-citation-tokens", "3"]
        asked = "Who may open the kiln?"
    environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    environment.pop("NO_COLOR", None)
    with pexpect.spawn(
        sys.executable,
        command,
        env=environment,
        encoding="utf-8",
        timeout=120,
        dimensions=(40, 100),
        cwd=ROOT,
    ) as terminal:
        terminal.expect(r"Ctrl-C.{0,20}stops")  # the line may be wrapped
        terminal.expect_exact("> ")
        terminal.sendline(asked)
        terminal.expect_exact("…")  # stands there until the first token
        terminal.sendintr()
        terminal.expect_exact("(stopped)")
        terminal.expect_exact("> ")
        terminal.sendline(asked)
        terminal.expect(r"\[1\]\S* \S+\.(md|txt)")
        if is_real:
            terminal.expect_exact("tokens each")
        terminal.expect_exact("> ")
        terminal.sendline("1")
        terminal.expect(r"\x1b\[[\d;]*103m|\x1b\[[\d;]*48;5;11m")  # a bright yellow background
        terminal.expect_exact("> ")
        terminal.sendeof()
        terminal.expect(pexpect.EOF)
        assert terminal.wait() == 0
