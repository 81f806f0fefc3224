"""``ChatLocal.batch`` and ``abatch``: scheduled unasked, in order, with a bar where they are long."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest

from local_backend import ChatLocal, Engine
from local_backend.langchain import engine_chat
from local_backend.scheduling.lengths import Scheduling
from tests.tiny import tiny_chat

QUESTIONS = [f"How can I bake bread at home{' today' * (number % 5)}?" for number in range(40)]


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatLocal]:
    with tiny_chat(max_tokens=6, max_rows=4) as chat:
        yield chat


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """A terminal on which bars appear without a delay."""
    monkeypatch.setattr(engine_chat, "_LEAST_SHOWN_SECONDS", 0.0)
    return _Terminal()


async def test_long_batches_keep_their_order_and_show_a_bar(chat: ChatLocal, terminal: _Terminal) -> None:
    alone = {question: chat.invoke(question).text for question in QUESTIONS[:5]}
    want = [alone[question] for question in QUESTIONS]
    with redirect_stderr(terminal):
        assert [message.text for message in chat.batch(QUESTIONS)] == want
        assert [message.text for message in await chat.abatch(QUESTIONS)] == want
    assert terminal.getvalue().count("| 40/40 [") == 2


async def test_errors_are_counted(chat: ChatLocal, terminal: _Terminal) -> None:
    inputs: list[Any] = [*QUESTIONS[:36], []]
    with redirect_stderr(terminal):
        chat.batch(inputs, return_exceptions=True)
        await chat.abatch(inputs, return_exceptions=True)
        assert terminal.getvalue().count("| 37/37 [") == 2
        with pytest.raises(ValueError, match="no message"):
            chat.batch(inputs)
    assert terminal.getvalue().endswith("\n")  # the bar was closed


@pytest.mark.parametrize("reason", ["few", "quick", "off", "pipe"])
async def test_no_bar_without_need(
    reason: str, chat: ChatLocal, terminal: _Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "quick":
        monkeypatch.setattr(engine_chat, "_LEAST_SHOWN_SECONDS", 3600.0)
    if reason == "pipe":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    inputs = QUESTIONS[:32] if reason == "few" else QUESTIONS
    quiet = chat.model_copy(update={"progress": reason != "off"})
    with redirect_stderr(terminal):
        assert len(quiet.batch(inputs)) == len(await quiet.abatch(inputs)) == len(inputs)
    assert not terminal.getvalue()


async def test_errors_are_langchains(chat: ChatLocal) -> None:
    inputs: list[Any] = [*QUESTIONS[:36], [], *QUESTIONS[36:]]
    results = chat.batch(inputs, return_exceptions=True)
    assert [type(result) for result in results].count(ValueError) == 1
    assert isinstance(results[36], ValueError)
    assert [type(result) for result in await chat.abatch(inputs, return_exceptions=True)] == [
        type(result) for result in results
    ]
    with pytest.raises(ValueError, match="no message"):
        chat.batch(inputs)
    with pytest.raises(ValueError, match="no message"):
        await chat.abatch(inputs)


def test_scheduling_is_chosen_when_the_model_is_made(chat: ChatLocal) -> None:
    assert chat.engine.scheduling == Scheduling("longest_first")
    engine = chat.engine
    other = ChatLocal(engine=engine, scheduling="shortest_first", max_tokens=4)
    assert engine.scheduling.policy == "shortest_first"
    assert len(other.batch(QUESTIONS[:9])) == 9
    ChatLocal(engine=engine)
    assert engine.scheduling.policy == "shortest_first"
    with pytest.raises(ValueError, match="no policy is named 'any'"):
        ChatLocal(engine=engine, scheduling="any")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ValueError, match="max_cache_bytes=None, which cannot change, but got 5"):
        ChatLocal(engine=engine, scheduling=Scheduling(max_cache_bytes=5))
    with tiny_chat(scheduling=Scheduling("first_come", max_cache_bytes=2**22)) as limited:
        assert isinstance(limited.engine, Engine)
        assert limited.batch(QUESTIONS[:3], max_tokens=3)[0].text
        assert limited.engine.peak_cache_bytes <= 2**22
    chat.engine.reschedule("longest_first")
