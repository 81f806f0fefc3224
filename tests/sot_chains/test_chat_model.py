"""Chains as chat models: LangChain's standard suites, and its validator of events."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from langchain_tests.utils.stream_lifecycle import assert_valid_event_stream

from retrieval_copy import BM25Retriever, RetrievalCopyChain
from sot_chains import SkeletonOfThought
from sot_chains.answering.chat_model import SkeletonChatModel
from tests.sot_chains.fakes import (
    ANSWER,
    PLAIN,
    QUESTION,
    PacedChatModel,
    answer_to,
    nothing_runs,
    sot_of,
    what,
)

# LangChain says so of its events once in a process, whoever asks for them.
pytestmark = pytest.mark.filterwarnings("ignore:.* is in beta")


class _OfPoints:
    """What the suites are told: a model of text, whose fake calls no tools and writes no JSON."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return SkeletonChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"chain": sot_of(PacedChatModel()), "model_name": "paced:sot"}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_tool_choice(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class TestUnits(_OfPoints, ChatModelUnitTests):
    """The suite that asks nothing."""


class TestAnswers(_OfPoints, ChatModelIntegrationTests):
    """The suite that asks."""


def text_of(events: list[Any]) -> list[str]:
    """The text of each block, in reading order; they end in the order of arrival."""
    ended = [one for one in events if one["event"] == "content-block-finish"]
    return [one["content"]["text"] for one in sorted(ended, key=lambda one: one["index"])]


@pytest.mark.parametrize("pause", [0.0, 0.002], ids=["at-once", "paced"])
async def test_the_events_of_an_answer_are_valid_and_each_point_is_a_block(pause: float) -> None:
    sot = sot_of(PacedChatModel(pause=pause))
    stream = await sot.astream_events(QUESTION, version="v3")
    events = [event async for event in stream]
    assert_valid_event_stream(events)
    assert "".join(text_of(events)) == ANSWER
    assert len(text_of(events)) == 3
    deltas = [one["index"] for one in events if one["event"] == "content-block-delta"]
    assert deltas != sorted(deltas)  # they are written at once
    message = await stream.output
    assert message.text == ANSWER
    assert message.response_metadata["sot"]["usage"] == message.usage_metadata
    assert await nothing_runs()


def test_the_events_are_the_same_for_synchronous_callers() -> None:
    stream = sot_of(PacedChatModel()).stream_events(QUESTION, version="v3")
    events = list(stream)
    assert_valid_event_stream(events)
    assert "".join(text_of(events)) == ANSWER == stream.output.text


async def test_a_plain_answer_is_one_block() -> None:
    stream = await SkeletonOfThought(PacedChatModel(), router="never").astream_events(QUESTION, version="v3")
    events = [event async for event in stream]
    assert_valid_event_stream(events)
    assert text_of(events) == [PLAIN]


async def test_a_failed_point_leaves_valid_events() -> None:
    def answer(messages: Any) -> str:
        if what(messages) == "Dark room":
            raise ValueError("no such point")
        return answer_to(messages)

    sot = sot_of(PacedChatModel(answer=answer), on_failure="omit")
    stream = await sot.astream_events(QUESTION, version="v3")
    events = [event async for event in stream]
    assert_valid_event_stream(events)
    assert "Close the curtains" not in "".join(text_of(events))
    assert "Go to bed" in "".join(text_of(events))


async def test_answers_from_documents_stream_valid_events_too() -> None:
    documents = [Document("The kiln is opened by Ada on Mondays.", metadata={"source": "kiln.md"})]
    chain = RetrievalCopyChain(
        BM25Retriever(documents=documents),
        PacedChatModel(answer=lambda messages: "The kiln is opened by Ada on Mondays."),
    )
    stream = await chain.astream_events("Who opens the kiln?", version="v3")
    events = [event async for event in stream]
    assert_valid_event_stream(events)
    assert "Ada" in "".join(text_of(events))
