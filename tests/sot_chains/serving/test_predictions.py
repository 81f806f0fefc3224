"""Predicted outputs, documents and drafters of a request, by OpenAI's own client on the default model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult

import retrieval_copy
from sot_chains.serving import Copying
from tests.sot_chains.serving.running import Served, served

if TYPE_CHECKING:
    from local_backend import ChatLocal

ASKED: Any = [{"role": "user", "content": "Explain how bread is baked at home, from the flour to the crust."}]
NUM_TOKENS = 200
USAGE = ("accepted_prediction_tokens", "rejected_prediction_tokens")


class _Listener(BaseCallbackHandler):
    """Hears what the engine did for each answer."""

    def __init__(self) -> None:
        self.decoding: list[dict[str, Any]] = []

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        generation: Any = response.generations[0][0]
        self.decoding.append(generation.message.response_metadata["decoding"])


LISTENER = _Listener()


@pytest.fixture(scope="module")
def running(default_chat: ChatLocal) -> Iterator[Served]:
    chat = default_chat.model_copy(update={"callbacks": [LISTENER]})
    with served(chat, copying=Copying(retrieval_copy.cite)) as running:
        yield running


class Client:
    """OpenAI's client for one server, beside what its engine did."""

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        self._client, self._model = client, model

    def ask(self, max_tokens: int, **options: Any) -> tuple[Any, int, int]:
        """The reply, the engine's forwards and the tokens it drafted."""
        LISTENER.decoding.clear()
        limits: Any = {"model": self._model, "messages": ASKED, "max_tokens": max_tokens, "temperature": 0}
        reply = self._client.chat.completions.create(**limits, **options)
        (decoding,) = LISTENER.decoding
        return reply, decoding["num_forwards"], decoding["num_drafted"]


@pytest.fixture
def client(running: Served, default_chat: ChatLocal) -> Iterator[Client]:
    with openai.OpenAI(base_url=running.api, api_key="none", timeout=120) as client:
        yield Client(client, default_chat.model_name)


@pytest.mark.slow
def test_an_edited_text_takes_a_third_of_the_forwards(client: Client, running: Served) -> None:
    plain, num_plain, _ = client.ask(NUM_TOKENS)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens == NUM_TOKENS
    words = text.split(" ")
    edited = " ".join("something" if number % 25 == 24 else word for number, word in enumerate(words))
    assert edited != text
    parts = [{"type": "text", "text": edited[:80]}, {"type": "text", "text": edited[80:]}]
    for content in (edited, parts):
        reply, num_forwards, num_drafted = client.ask(
            NUM_TOKENS, prediction={"type": "content", "content": content}
        )
        assert reply.choices[0].message.content == text
        assert num_forwards <= num_plain / 3, (num_forwards, num_plain)
        details = reply.usage.completion_tokens_details
        accepted, rejected = (getattr(details, name) for name in USAGE)
        assert accepted + rejected == num_drafted
        assert accepted >= NUM_TOKENS - num_forwards - 1
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    (count,) = [line.rsplit(" ", 1)[1] for line in lines if line.startswith("sot_draft_acceptance_count")]
    assert float(count) >= 2


def test_a_request_names_its_drafter(client: Client) -> None:
    prediction: Any = {"type": "content", "content": "bread " * 20}
    plain, _, num_plain = client.ask(12)
    same, _, num_drafted = client.ask(12, prediction=prediction, extra_body={"speculative": "none"})
    other, _, num_guessed = client.ask(12, extra_body={"speculative": "jacobi"})
    assert num_plain == num_drafted == 0 < num_guessed
    assert len({one.choices[0].message.content for one in (plain, same, other)}) == 1
    with pytest.raises(openai.BadRequestError, match="no drafter is named 'fast'"):
        client.ask(4, extra_body={"speculative": "fast"})
    with pytest.raises(openai.BadRequestError, match="prediction is a text"):
        client.ask(4, prediction={"type": "content", "content": 5})


def test_documents_are_copied_from_and_cited(client: Client) -> None:
    plain, num_plain, _ = client.ask(24)
    text = plain.choices[0].message.content
    documents: Any = ["Rye.", {"id": "own", "data": {"text": f"It says: {text}"}}]
    options: Any = {"documents": documents, "speculative": "reference_copy"}
    reply, num_forwards, num_drafted = client.ask(24, extra_body=options)
    assert reply.choices[0].message.content == text  # its chat template shows no documents
    assert num_forwards < num_plain / 2 < num_drafted
    (annotation,) = reply.choices[0].message.annotations
    assert (annotation.url_citation.title, annotation.url_citation.document) == ("own", 1)
    assert annotation.url_citation.cited_text in text
