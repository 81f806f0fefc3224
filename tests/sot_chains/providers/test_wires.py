"""Stops, cuts and reasoning over both vendors' wires."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from sot_chains import SkeletonOfThought
from tests.sot_chains.fakes import (
    ANSWER,
    EXPANSIONS,
    QUESTION,
    answer_to,
    is_skeleton_request,
    nothing_runs,
    sot_of,
)
from tests.sot_chains.filters.test_reasoning import ANSWER as REPLY
from tests.sot_chains.filters.test_reasoning import REPLIES, THOUGHT
from tests.sot_chains.server import MODEL, ChatServer, chat_server

WIRES = ["openai", "anthropic"]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


def sot_on(wire: str, server: ChatServer, **options: Any) -> SkeletonOfThought:
    url = server.anthropic_url if wire == "anthropic" else server.url
    return sot_of(f"{wire}:{MODEL}", base_url=url, api_key="k", prefill=False, **options)


def stops_of(request: dict[str, Any]) -> list[str]:
    return list(request.get("stop") or request.get("stop_sequences") or [])


@pytest.mark.parametrize("wire", WIRES)
async def test_points_are_sent_with_stops(wire: str, server: ChatServer) -> None:
    message = await sot_on(wire, server).ainvoke(QUESTION)
    assert message.text == ANSWER
    assert [stops_of(request) for request in server.requests] == [["\n\n"], ["\n"], ["\n"], ["\n"]]


@pytest.mark.parametrize("wire", WIRES)
async def test_a_server_that_ignores_stops_is_cut_and_its_request_cancelled(
    wire: str, server: ChatServer
) -> None:
    def answer(messages: Sequence[BaseMessage]) -> str:
        text = answer_to(messages)
        if is_skeleton_request(str(messages[-1].text)):
            return text
        points = [f"{number}. {label}: {said}" for number, (label, said) in enumerate(EXPANSIONS.items(), 1)]
        return "\n".join([text, "", *points, "And so on. " * 2000])

    server.answer, server.pause_seconds = answer, 0.001
    message = await sot_on(wire, server).ainvoke(QUESTION)
    points = message.response_metadata["sot"]["points"]
    assert [point["stopped_by"] for point in points] == ["overrun"] * 3
    assert message.text == ANSWER
    assert server.all_closed()  # long before 2,000 words are written
    assert await nothing_runs()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("form", ["think", "brackets", "closing tag alone", "harmony"])
async def test_reasoning_stays_out_of_streams_cut_at_every_byte(
    wire: str, form: str, server: ChatServer
) -> None:
    def answer(messages: Sequence[BaseMessage]) -> str:
        return REPLIES[form].replace(REPLY, answer_to(messages))

    server.answer, server.cuts_bytes = answer, True
    sot = sot_on(wire, server)
    text = "".join([chunk.text async for chunk in sot.astream(QUESTION)])
    assert text == ANSWER
    assert (await sot.ainvoke(QUESTION)).text == ANSWER
    assert THOUGHT.split()[0] not in text
