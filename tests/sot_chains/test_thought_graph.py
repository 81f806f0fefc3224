"""Graphs of thoughts on the default model, and on a server that speaks OpenAI's wire."""

from __future__ import annotations

import re
from typing import Any

import pytest

from local_backend import ChatLocal
from sot_chains import Thought, ThoughtGraph, close_clients
from tests.sot_chains.serving.running import served

pytestmark = pytest.mark.slow
QUESTIONS = [
    (
        "How do I plan a weekend in Paris?",
        {
            "Sights": "{question} Name three famous sights and say why each is worth a visit.",
            "Food": "{question} Name two dishes to try.",
            "Days": "{question} These are the sights: {Sights}\n\nWrite which to visit on which day.",
            "Evening": "{question} These are the dishes: {Food}\n\nWrite where and when to eat them.",
        },
    ),
    (
        "How do I plan a small vegetable garden?",
        {
            "Vegetables": "{question} Name three vegetables that are easy to grow.",
            "Place": "{question} Write which place in the garden is good.",
            "Calendar": "{question} These are the vegetables: {Vegetables}\n\nWrite when to sow each.",
            "Work": "{question} This is the calendar: {Calendar}\n\nWrite what work there is each week.",
        },
    ),
]


def words_of(text: str) -> set[str]:
    """Words that say something, with case folded."""
    return set(re.findall(r"[a-z]{5,}", text.casefold()))


def check(message: Any, thoughts: dict[str, str]) -> None:
    """Every point is there, at most cut, refers to what it builds on, and says no sentence twice."""
    trace = message.response_metadata["sot"]
    assert trace["route"] == "graph"
    assert {failure["status"] for failure in trace["failures"]} <= {"cut"}, trace["failures"]
    texts = {point["number"]: point["text"] for point in trace["points"]}
    for point in trace["points"]:
        assert not re.search(r"\{|\}|^\d+\.$", point["text"], re.MULTILINE)
        for need in point["needs"]:
            assert words_of(texts[need]) & words_of(point["text"]), (texts[need], point["text"])
    assert words_of(trace["conclusion"]["text"]) & words_of(" ".join(texts.values()))
    for text in [*texts.values(), trace["conclusion"]["text"]]:
        sentences = [one.strip() for one in re.split(r"(?<=[.!?])\s", text) if len(one.split()) >= 8]
        assert len(sentences) == len(set(sentences))
    assert [point["label"] for point in trace["points"]] == list(thoughts)


@pytest.mark.parametrize(("question", "thoughts"), QUESTIONS)
async def test_the_default_model_builds_on_what_it_wrote(
    default_chat: ChatLocal, question: str, thoughts: dict[str, str]
) -> None:
    chat = default_chat.model_copy(update={"max_tokens": 300})
    check(await ThoughtGraph(chat, thoughts, conclusion=True).ainvoke(question), thoughts)


async def test_so_does_a_server_that_speaks_the_wire_of_openai(default_chat: ChatLocal) -> None:
    question, thoughts = QUESTIONS[0]
    with served(default_chat) as running:
        model = f"openai:{default_chat.model_name}"
        listed = [Thought(name=name, prompt=prompt) for name, prompt in thoughts.items()]
        graph = ThoughtGraph(model, listed, conclusion=True, base_url=running.api, api_key="none")
        message = await graph.ainvoke(question, max_tokens=300, temperature=0.0)
        check(message, thoughts)
        chat = default_chat.model_copy(update={"max_tokens": 300, "temperature": 0.0})
        assert message.text == (await ThoughtGraph(chat, listed, conclusion=True).ainvoke(question)).text
        await close_clients()
