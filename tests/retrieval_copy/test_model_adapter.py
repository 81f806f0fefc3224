"""How references travel: to a local model, as OpenAI's prediction over a real wire, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda

from local_backend import ChatLocal, References
from retrieval_copy import RetrievalCopyChain
from retrieval_copy.citations.support import NOT_HELD
from retrieval_copy.model_adapter import (
    ProviderModel,
    arguments,
    find_transport,
    joined,
    limits,
    max_input_tokens,
    takes_quotes,
    token_counter,
)
from sot_chains import SkeletonOfThought
from sot_chains.providers import ProviderError, make_provider
from tests.retrieval_copy.fakes import CLAY, GLAZE, QUESTION, QuotingModel, retriever
from tests.sot_chains.server import ChatServer, chat_server, unused_url


@pytest.fixture(scope="module")
def chat(default_copying: ChatLocal) -> ChatLocal:
    return default_copying


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        server.model = "gpt-4.1-mini"
        yield server


def test_wrappers_are_looked_through(chat: ChatLocal) -> None:
    other = FakeListChatModel(responses=["x"])
    for local in (chat, chat.bind(max_tokens=3), chat.with_retry(), SkeletonOfThought(chat, router="always")):
        assert find_transport(local) == "references"
    assert find_transport(chat.with_fallbacks([chat])) == "references"
    assert find_transport(chat.with_fallbacks([other])) is None
    assert find_transport(other) is None
    assert find_transport(RunnableLambda(lambda x: x) | chat) is None  # its arguments would go to the first
    assert find_transport(other, prediction=True) == "prediction"


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("gpt-4o", "prediction"),
        ("gpt-4.1-nano", "prediction"),
        ("gpt-4o-mini-2024-07-18", "prediction"),
        ("gpt-4o-audio-preview", None),
        ("o3", None),
        ("gpt-5", None),
        ("my-own", None),
    ],
)
def test_models_known_to_take_predicted_outputs(name: str, way: str | None) -> None:
    model = ProviderModel(make_provider(f"openai:{name}", base_url="http://127.0.0.1:1/v1"))
    assert find_transport(model) == way
    assert find_transport(model, prediction=False) is None


def test_arguments_hold_a_handle_or_one_text(chat: ChatLocal) -> None:
    assert arguments("references", ["a", "b"]) == {"references": References(["a", "b"])}
    assert arguments("prediction", ["a", "b"]) == {"prediction": {"type": "content", "content": "a\n\nb"}}
    assert arguments("references", []) == arguments(None, ["a"]) == {}
    assert len(arguments("prediction", ["a" * 100_000])["prediction"]["content"]) < 10_000


def test_a_local_model_is_bounded_unless_the_user_has_bounded_it(chat: ChatLocal) -> None:
    chat = ChatLocal(engine=chat.engine)
    ours = {"max_tokens": 9, "stop": ["\nQuestion:"]}

    def given(model: Any) -> dict[str, Any]:
        return limits(model, ours)

    assert given(chat) == given(chat.with_retry()) == given(SkeletonOfThought(chat, router="always")) == ours
    assert given(chat.bind(max_tokens=3)) == given(chat.bind(max_new_tokens=3)) == {"stop": ours["stop"]}
    assert given(chat.model_copy(update={"max_tokens": None}).with_retry()) == {"stop": ours["stop"]}
    assert given(chat.bind(stop=["END"])) == {"max_tokens": 9}
    assert given(FakeListChatModel(responses=["x"])) == {}
    assert joined(ours, {"max_new_tokens": 4, "stop": ["."]}) == {"max_new_tokens": 4, "stop": ["."]}


def test_local_models_quote_unless_the_user_asks_otherwise(chat: ChatLocal) -> None:
    def quotes(model: Any, wanted: bool | None = None, *, has_own_prompt: bool = False) -> bool:
        return takes_quotes(model, wanted, has_own_prompt=has_own_prompt)

    assert quotes(chat)
    assert quotes(chat.bind(max_tokens=3).with_retry())
    assert quotes(chat, True, has_own_prompt=True)
    assert not quotes(chat, False)
    assert not quotes(chat, has_own_prompt=True)
    assert not quotes(SkeletonOfThought(chat, router="always"))
    assert not quotes(FakeListChatModel(responses=["x"]))
    with pytest.raises(ValueError, match="quotes=True needs a ChatLocal"):
        quotes(FakeListChatModel(responses=["x"]), True)
    grammar = {"grammar": "start: /x/", "max_tokens": 9}
    assert joined(grammar, {"response_format": {"type": "json_object"}}) == {
        "max_tokens": 9,
        "response_format": {"type": "json_object"},
    }


async def test_a_small_model_quotes_whole_sentences_of_one_passage(chat: ChatLocal) -> None:
    chain = RetrievalCopyChain(retriever(CLAY, GLAZE), chat)
    answer = chain.invoke(QUESTION, max_tokens=200)
    assert answer.text == NOT_HELD or any(answer.text in one.page_content for one in (CLAY, GLAZE))
    assert answer.text.endswith(".")
    assert "".join(chunk.text for chunk in chain.stream(QUESTION, max_tokens=200)) == answer.text
    begun = chain.invoke([HumanMessage(QUESTION), AIMessage("Once it")], max_tokens=4)  # no grammar there
    assert begun.text


def test_what_models_say_of_their_limits(chat: ChatLocal) -> None:
    assert max_input_tokens(chat.bind(stop=["x"])) == chat.engine.max_positions
    assert max_input_tokens(FakeListChatModel(responses=["x"])) is None
    assert token_counter(chat)(CLAY.page_content) == len(chat.get_token_ids(CLAY.page_content))
    assert token_counter(FakeListChatModel(responses=["x"]))("four") == 2


async def test_a_named_model_is_sent_the_documents_as_prediction(server: ChatServer) -> None:
    chain = RetrievalCopyChain(
        retriever(CLAY, GLAZE), "openai:gpt-4.1-mini", base_url=server.url, api_key="k"
    )
    answer = chain.invoke(QUESTION, temperature=0)
    assert answer.text not in str(server.requests)
    assert answer.response_metadata["retrieval"]["copied_as"] == "prediction"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    (request,) = server.requests
    content = request["prediction"]["content"]
    assert CLAY.page_content in content
    assert GLAZE.page_content in content
    assert request["temperature"] == 0
    assert (await chain.ainvoke(QUESTION)).text == answer.text
    assert "".join(chunk.text for chunk in chain.stream(QUESTION)) == answer.text
    assert "".join([chunk.text async for chunk in chain.astream(QUESTION)]) == answer.text
    assert [one.text for one in chain.batch([QUESTION] * 4)] == [answer.text] * 4
    assert [one.text for one in await chain.abatch([QUESTION] * 4)] == [answer.text] * 4


def test_a_named_model_that_takes_no_prediction_gets_none(server: ChatServer) -> None:
    server.model = "plain-1"
    chain = RetrievalCopyChain(retriever(CLAY), "openai:plain-1", base_url=server.url)
    chain.invoke(QUESTION)
    assert "prediction" not in server.requests[0]
    RetrievalCopyChain(retriever(CLAY), "openai:plain-1", base_url=server.url, prediction=True).invoke(
        QUESTION
    )
    assert "prediction" in server.requests[1]


def test_leaving_a_stream_closes_the_request(server: ChatServer) -> None:
    server.pause_seconds = 0.05
    chain = RetrievalCopyChain(None, "openai:gpt-4.1-mini", base_url=server.url)
    stream = chain.stream(QUESTION)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # a generator
    assert server.all_closed()


def test_a_server_that_is_down_is_a_clear_error() -> None:
    chain = RetrievalCopyChain(None, "openai:gpt-4.1-mini", base_url=unused_url(), max_retries=0)
    with pytest.raises(ProviderError, match="no connection to"):
        chain.invoke(QUESTION)


def test_synchronous_calls_work_inside_a_running_loop(server: ChatServer) -> None:
    chain = RetrievalCopyChain(retriever(CLAY), "openai:gpt-4.1-mini", base_url=server.url)

    async def ask() -> str:
        return chain.invoke(QUESTION).text

    assert asyncio.run(ask())


def test_references_of_the_caller_come_first(chat: ChatLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    original = ChatLocal.ainvoke
    monkeypatch.setattr(
        ChatLocal,
        "ainvoke",
        lambda self, *args, **kwargs: seen.append(kwargs) or original(self, *args, **kwargs),
    )
    RetrievalCopyChain(retriever(CLAY), chat).invoke(QUESTION, max_tokens=2, references=["mine"])
    (given,) = seen
    assert given["references"].texts == ("mine", CLAY.page_content)


def test_the_model_is_told_nothing_it_does_not_know() -> None:
    model = QuotingModel()
    RetrievalCopyChain(retriever(CLAY), model).invoke([HumanMessage(QUESTION)])
    assert model.parameters == [{}]
