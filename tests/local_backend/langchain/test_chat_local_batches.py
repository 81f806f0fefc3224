"""``ChatLocal.batch`` and ``abatch``: scheduled unasked, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from local_backend import ChatLocal, Engine
from local_backend.scheduling.lengths import Scheduling
from tests.tiny import tiny_chat

QUESTIONS = [f"How can I bake bread at home{' today' * (number % 5)}?" for number in range(40)]


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatLocal]:
    with tiny_chat(max_tokens=6, max_rows=4) as chat:
        yield chat


async def test_long_batches_keep_their_order(chat: ChatLocal) -> None:
    alone = {question: chat.invoke(question).text for question in QUESTIONS[:5]}
    want = [alone[question] for question in QUESTIONS]
    assert [message.text for message in chat.batch(QUESTIONS)] == want
    assert [message.text for message in await chat.abatch(QUESTIONS)] == want


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
