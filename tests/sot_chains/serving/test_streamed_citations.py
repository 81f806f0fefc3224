"""Citations stream with the text, and together are those of the answer in one piece."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.runnables import RunnableGenerator, RunnableLambda

from retrieval_copy import RetrievalCopyChain, cite
from sot_chains.serving import Copying
from sot_chains.serving.answer import Answer
from sot_chains.serving.app import create_app
from tests.sot_chains.serving.running import served

NUM_ANSWERS, LONGEST = 200, 4  # spans of an answer
DOCUMENTS = [
    Document(" ".join(f"{word}{number}" for number in range(25)), id=word, metadata={"title": word.title()})
    for word in ("clay", "kiln", "glaze")
]


def _pieces(asked: str) -> list[str]:
    """The answer to a question: spans of documents and words of its own, cut anywhere."""
    chance = random.Random(asked)
    text = ""
    for _ in range(chance.randint(1, LONGEST)):
        words = chance.choice(DOCUMENTS).page_content.split()
        start = chance.randrange(len(words) - 12)
        span = words[start : start + chance.randint(6, 12)]
        own = [f"own{chance.randrange(1000)}" for _ in range(chance.randrange(4))]
        text += " ".join([*span, *own]) + chance.choice([". ", ", ", " ", "\n\n"])
    cuts = sorted({0, len(text), *(chance.randrange(len(text)) for _ in range(chance.randrange(6)))})
    return [text[start:end] for start, end in pairwise(cuts)]


async def _write(asked: AsyncIterator[Any]) -> AsyncIterator[AIMessageChunk]:
    async for messages in asked:
        for piece in _pieces(str(messages[-1].text).rpartition("Question: ")[2]):
            yield AIMessageChunk(piece)
        yield AIMessageChunk("", response_metadata={"finish_reason": "stop"})


def _chain(model: Any) -> RetrievalCopyChain:
    return RetrievalCopyChain(RunnableLambda(lambda _: DOCUMENTS), model)


APP: Any = {"name": "fake", "copying": Copying(cite, from_folder=_chain)}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        served(RunnableGenerator(_write), **APP) as running,
        openai.OpenAI(base_url=running.api, api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_streamed_citations_are_those_of_the_whole_answer() -> None:
    transport = httpx.ASGITransport(create_app(RunnableGenerator(_write), **APP))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        counts = await asyncio.gather(*(_compare(client, number) for number in range(NUM_ANSWERS)))
    num_cited, num_early = map(sum, zip(*counts, strict=True))
    assert num_cited > NUM_ANSWERS
    assert num_early > num_cited / 3  # of the others the span, or the piece that ends it, is the last


async def _compare(client: httpx.AsyncClient, number: int) -> tuple[int, int]:
    """How many citations an answer has, and how many of them came before its end."""
    asked: dict[str, Any] = {"model": "fake:copy", "stream": True}
    if number % 2:
        asked["messages"] = [{"role": "user", "content": f"Is it {number}?"}]
        text, told, before = _read_chat((await client.post("/v1/chat/completions", json=asked)).text)
    else:
        asked["input"] = f"Is it {number}?"
        text, told, before = _read_responses((await client.post("/v1/responses", json=asked)).text)
    names = ("start", "end", "document", "document_start", "document_end")
    cited = [[one[name] for name in names] for one in cite(text, DOCUMENTS)]  # as of an answer in one piece
    assert [
        [one["start_index"], one["end_index"], *(one[name] for name in names[2:])] for one in told
    ] == cited
    assert all(one["end_index"] <= so_far for one, so_far in zip(told, before, strict=True))
    return len(cited), sum(so_far < len(text) for so_far in before)


def _events(stream: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def _read_chat(stream: str) -> tuple[str, list[Any], list[int]]:
    """The text of a stream, its citations, and the characters of text before each."""
    text, told, before = "", list[Any](), list[int]()
    for event in _events(stream):
        delta = event["choices"][0]["delta"]
        text += delta.get("content", "")
        for annotation in delta.get("annotations", ()):
            assert annotation["index"] == len(told)
            told.append(annotation["url_citation"])
            before.append(len(text))
    return text, told, before


def _read_responses(stream: str) -> tuple[str, list[Any], list[int]]:
    """The same of the newer protocol, whose last event has all of them."""
    text, told, before = "", list[Any](), list[int]()
    for event in _events(stream):
        match event["type"]:
            case "response.output_text.delta":
                text += event["delta"]
            case "response.output_text.annotation.added":
                assert event["annotation_index"] == len(told)
                told.append(event["annotation"])
                before.append(len(text))
            case "response.completed":
                assert event["response"]["output"][0]["content"][0]["annotations"] == told
    assert {one.pop("type") for one in told} <= {"url_citation"}
    return text, told, before


def test_openais_client_joins_them(client: openai.OpenAI) -> None:
    """Its helpers for streams join lists by an index, and refuse those without."""
    asked: Any = [{"role": "user", "content": "Is it 3?"}]
    whole = client.chat.completions.create(model="fake:copy", messages=asked).choices[0].message
    with client.chat.completions.stream(model="fake:copy", messages=asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    cited = [one.url_citation for one in whole.annotations or []]
    assert len(cited) > 1
    assert [one.url_citation for one in streamed.annotations or []] == cited
    with client.responses.stream(model="fake:copy", input="Is it 3?") as events:
        (message,) = events.get_final_response().output
    given = message.content[0].annotations  # type: ignore[union-attr]  # a text has them
    assert [one.start_index for one in given] == [one.start_index for one in cited]


async def test_references_are_cited_after_what_the_chain_cites() -> None:
    answer = Answer(
        _chain(RunnableGenerator(_write)),
        [HumanMessage("Is it 3?")],
        {},
        cite=partial(cite, documents=[Document("x", id="x"), *DOCUMENTS]),
    )
    told = [one for _ in [None] async for _ in answer.stream() for one in answer.untold()]
    num_streamed = len(told)
    told += answer.untold()
    assert [number for number, _ in told] == list(range(len(told)))
    assert [annotation for _, annotation in told] == answer.annotations
    assert len(told) >= 2 * num_streamed > 0
    assert not answer.untold()
