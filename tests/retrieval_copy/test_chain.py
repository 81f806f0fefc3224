"""The chain over a model that quotes: ways of calling, history, streams, faults, composition."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.graph import START, MessagesState, StateGraph

from retrieval_copy import (
    BM25Retriever,
    EarlierTurns,
    RetrievalCopyChain,
    RetrievalError,
    RetrievedDocuments,
    SentenceEmbeddings,
    SimilarAnswers,
    WithCitations,
)
from retrieval_copy.citations.support import NOT_HELD, REFUSAL
from sot_chains import SkeletonOfThought
from tests.retrieval_copy.fakes import (
    CLAY,
    GLAZE,
    QUESTION,
    QuotingModel,
    assert_literal,
    broken_retriever,
    retriever,
)
from tests.sot_chains import fakes as sot_fakes

HISTORY = [HumanMessage("Tell me about kilns."), AIMessage("They are hot."), HumanMessage("And to open one?")]


@pytest.fixture
def model() -> QuotingModel:
    return QuotingModel()


@pytest.fixture
def quoting(model: QuotingModel) -> RetrievalCopyChain:
    return RetrievalCopyChain(retriever(CLAY, GLAZE), model)


def summed(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    first, *others = chunks
    return first + others


def essence(message: AIMessage) -> tuple[Any, ...]:
    metadata = message.response_metadata
    return (
        message.text,
        metadata["citations"],
        metadata["retrieval"],
        message.usage_metadata,
        message.content_blocks,
    )


# Ways of calling -----------------------------------------------------------------------------------


async def test_all_six_ways_of_calling_agree(quoting: RetrievalCopyChain) -> None:
    answer = quoting.invoke(QUESTION)
    assert len(answer.response_metadata["citations"]) == 2
    assert_literal(answer, [CLAY, GLAZE])
    assert essence(await quoting.ainvoke([("user", QUESTION)])) == essence(answer)
    assert essence(summed(list(quoting.stream(QUESTION)))) == essence(answer)
    assert essence(summed([chunk async for chunk in quoting.astream(QUESTION)])) == essence(answer)
    assert [essence(one) for one in quoting.batch([QUESTION] * 3)] == [essence(answer)] * 3
    assert [essence(one) for one in await quoting.abatch([QUESTION] * 3)] == [essence(answer)] * 3


async def test_in_a_stream_citations_come_after_their_span_and_the_rest_last(
    quoting: RetrievalCopyChain,
) -> None:
    whole = quoting.invoke(QUESTION).response_metadata["citations"]
    for chunks in (list(quoting.stream(QUESTION)), [chunk async for chunk in quoting.astream(QUESTION)]):
        *before, last = chunks
        assert len(before) > 10
        text, given = "", []
        for chunk in before:
            text += str(chunk.text)
            given += (cited := chunk.response_metadata.get("citations", []))
            assert all(text[one["start"] : one["end"]] == one["text"] for one in cited)
            assert len((chunk.content_blocks or [{}])[0].get("annotations", [])) == len(cited)
        assert 0 < len(given) < len(whole)
        assert given + last.response_metadata["citations"] == whole
        assert not any(chunk.usage_metadata for chunk in before)
        assert last.chunk_position == "last"
        assert len({chunk.id for chunk in chunks}) == 1


def test_content_blocks_hold_standard_citations(quoting: RetrievalCopyChain) -> None:
    answer = quoting.invoke(QUESTION)
    (block,) = answer.content_blocks
    assert block["type"] == "text"
    assert block["text"] == answer.text == answer.content
    first, second = block["annotations"]
    assert (first["type"], first["title"], first["url"]) == (
        "citation",
        "Clay",
        "https://example.org/clay.html",
    )
    assert answer.text[second["start_index"] : second["end_index"]] == second["cited_text"]


def test_it_stands_in_a_sequence(quoting: RetrievalCopyChain) -> None:
    sequence = ChatPromptTemplate.from_messages([("user", "{question}")]) | quoting | StrOutputParser()
    assert sequence.invoke({"question": QUESTION}) == quoting.invoke(QUESTION).text
    assert "".join(sequence.stream({"question": QUESTION})) == quoting.invoke(QUESTION).text


async def test_a_failure_cancels_the_rest_of_a_batch_unless_told_otherwise(model: QuotingModel) -> None:
    going_on = 0

    async def slow(query: str) -> list[Document]:
        nonlocal going_on
        if "fail" in query:
            raise ValueError("no")
        going_on += 1
        try:
            await asyncio.sleep(5)
        finally:
            going_on -= 1
        return [CLAY]

    failing = RetrievalCopyChain(RunnableLambda(slow, name="slow"), model)
    with pytest.raises(RetrievalError):
        await failing.abatch(["one?", "two?", "please fail"])
    assert going_on == 0
    quick = RetrievalCopyChain(RunnableLambda(lambda query: [CLAY] if "fail" not in query else 1 / 0), model)
    for results in (
        await quick.abatch([QUESTION, "fail"], return_exceptions=True),
        quick.batch([QUESTION, "fail"], return_exceptions=True),
    ):
        assert results[0].text
        assert isinstance(results[1], RetrievalError)
    assert await quick.abatch([]) == quick.batch([]) == []


def test_arguments_of_the_call_reach_the_model(quoting: RetrievalCopyChain, model: QuotingModel) -> None:
    quoting.invoke(QUESTION, max_tokens=7)
    assert model.parameters[-1] == {"max_tokens": 7}  # and no references, which this model does not take


# History, prompts, documents -----------------------------------------------------------------------


def test_a_follow_up_is_searched_with_the_question_it_refers_to(model: QuotingModel) -> None:
    queries: list[str] = []

    def search(query: str) -> list[Document]:
        queries.append(query)
        return [CLAY]

    aware = RetrievalCopyChain(RunnableLambda(search), model)
    answer = aware.invoke([SystemMessage("Be kind."), *HISTORY])
    assert queries == ["Tell me about kilns. And to open one?"]
    assert queries == [answer.response_metadata["retrieval"]["query"]]
    (answering,) = model.requests
    assert [message.type for message in answering] == ["system", *["human", "ai"] * 2, "human"]
    aware.invoke([*HISTORY, AIMessage("At eighty degrees."), HumanMessage("How is clay wedged?")])
    assert queries[-1] == "How is clay wedged?"


def test_a_call_may_do_without_documents(quoting: RetrievalCopyChain, model: QuotingModel) -> None:
    answer = quoting.invoke([*HISTORY[:2], HumanMessage("Shorter, please.")], retrieve=False)
    assert answer.response_metadata["citations"] == []
    assert answer.text == "Nothing is known about please."
    assert len(model.requests) == 1
    assert "retrieve" not in model.parameters[-1]


def test_prompts_may_be_replaced(model: QuotingModel) -> None:
    own = RetrievalCopyChain(
        retriever(CLAY),
        model,
        prompt=ChatPromptTemplate.from_messages(
            [("system", "Use:\n{documents}"), ("user", "{asked}|{question}")]
        ),
        document_prompt=PromptTemplate.from_template("<{title}> {page_content}"),
    )
    own.invoke(HISTORY)
    system, user = model.requests[-1]
    assert system.text.startswith("Use:\n<Clay> Greenware")
    assert user.text == "And to open one?|Tell me about kilns. And to open one?"


def test_a_field_that_a_document_lacks_is_a_clear_error(model: QuotingModel) -> None:
    own = PromptTemplate.from_template("{page} {page_content}")
    with pytest.raises(ValueError, match=r"document_prompt wants \['page'\]"):
        RetrievalCopyChain(retriever(CLAY), model, document_prompt=own).invoke(QUESTION)


def test_a_document_retrieved_twice_is_shown_once(model: QuotingModel) -> None:
    answer = RetrievalCopyChain(retriever(CLAY, CLAY, GLAZE), model).invoke(QUESTION)
    assert model.requests[0][-1].text.count(CLAY.page_content) == 1
    assert answer.response_metadata["retrieval"]["num_documents_in_prompt"] == 2
    assert_literal(answer, [CLAY, CLAY, GLAZE])


def test_a_document_larger_than_the_context_is_cited_in_full(model: QuotingModel) -> None:
    filler = "\n\n".join(f"Paragraph {number} speaks of other things altogether." for number in range(5_000))
    large = Document(f"{filler}\n\n{CLAY.page_content}", id="large")
    answer = RetrievalCopyChain(retriever(large), model, max_document_tokens=120).invoke(QUESTION)
    (prompt,) = model.requests
    assert len(prompt[-1].text) < 1_200
    assert "eighty degrees" in prompt[-1].text
    assert answer.response_metadata["citations"]
    assert_literal(answer, [large])
    assert answer.response_metadata["citations"][-1]["document_end"] > len(filler)


# Faults --------------------------------------------------------------------------------------------


def test_without_documents_the_model_answers_plainly(model: QuotingModel) -> None:
    for nothing in (retriever(), retriever(Document("  \n")), None):
        answer = RetrievalCopyChain(nothing, model).invoke(QUESTION)
        assert answer.text == "Nothing is known about opened?"
        assert answer.response_metadata["citations"] == []
        assert [message.text for message in model.requests[-1]] == [QUESTION]


async def test_a_store_that_is_down_is_a_clear_error(model: QuotingModel) -> None:
    down = RetrievalCopyChain(RunnableLambda(broken_retriever, name="my store"), model)
    expected = r"my store could not be asked .*ConnectionError: no route to the store.*check"
    with pytest.raises(RetrievalError, match=expected):
        down.invoke(QUESTION)
    with pytest.raises(RetrievalError, match=expected):
        [chunk async for chunk in down.astream(QUESTION)]
    assert model.requests == []


def test_a_retriever_of_something_else_is_a_clear_error(model: QuotingModel) -> None:
    with pytest.raises(RetrievalError, match="must return a list of LangChain documents, got 'text'"):
        RetrievalCopyChain(RunnableLambda(lambda query: "text"), model).invoke(QUESTION)


@pytest.mark.parametrize(
    "odd",
    [
        Document("\x00\x01\udc80\uffff" * 300 + "the kiln \x00 opened", id="rubbish"),
        Document("窑炉冷却到八十度时可以打开，发光时绝对不能打开。请戴上手套。", id="zh"),
    ],
    ids=["rubbish", "another language"],
)
def test_odd_documents_give_no_wrong_citation(model: QuotingModel, odd: Document) -> None:
    documents = [odd, CLAY]
    answer = RetrievalCopyChain(retriever(*documents), model).invoke(QUESTION)
    assert_literal(answer, documents)
    assert any(citation["document_id"] == "clay" for citation in answer.response_metadata["citations"])
    model.requests[-1][-1].text.encode()  # nothing in the prompt that cannot be sent


def test_ten_thousand_documents(model: QuotingModel) -> None:
    documents = [
        Document(f"Note {number}: pot {number} was fired on day {number} of the year.")
        for number in range(10_000)
    ]
    answer = RetrievalCopyChain(retriever(*documents), model, max_document_tokens=500).invoke(QUESTION)
    trace = answer.response_metadata["retrieval"]
    assert trace["num_documents"] == 10_000
    assert 1 < trace["num_documents_in_prompt"] < 50
    assert_literal(answer, documents)


def test_wrong_arguments_are_refused(model: QuotingModel) -> None:
    with pytest.raises(TypeError, match=r"for a vector store pass store\.as_retriever"):
        RetrievalCopyChain("folder", model)  # type: ignore[arg-type]  # what is refused here
    with pytest.raises(ValueError, match="min_citation_tokens must be at least 1, got 0"):
        RetrievalCopyChain(None, model, min_citation_tokens=0)
    with pytest.raises(TypeError, match="base_url"):
        RetrievalCopyChain(None, model, base_url="http://127.0.0.1")
    with pytest.raises(ValueError, match="not supported by name"):
        RetrievalCopyChain(None, "nobody:nothing")
    with pytest.raises(ValueError, match="expected a human message"):
        RetrievalCopyChain(None, model).invoke([AIMessage("hello")])
    with pytest.raises(ValueError, match="the question is empty"):
        RetrievalCopyChain(None, model).invoke("  ")
    with pytest.raises(TypeError, match="got int"):
        RetrievalCopyChain(None, model).invoke(3)  # type: ignore[arg-type]  # what is refused here


def test_a_model_that_answers_with_neither_message_nor_text_is_refused() -> None:
    parsed = RunnableLambda(lambda messages: {"a": 1})
    with pytest.raises(TypeError, match="parsers belong after RetrievalCopyChain"):
        RetrievalCopyChain(retriever(CLAY), parsed).invoke(QUESTION)
    text = RunnableLambda(lambda messages: "The kiln may be opened once the cone reads eighty degrees")
    answer = RetrievalCopyChain(retriever(CLAY), text).invoke(QUESTION)
    assert answer.response_metadata["citations"][0]["document_id"] == "clay"


COPIES = pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda chain: pickle.loads(pickle.dumps(chain))], ids=["deepcopy", "pickle"]
)


@COPIES
def test_a_copied_chain_answers_alike(copied: Callable[[Any], Any]) -> None:
    found = BM25Retriever(documents=[CLAY, GLAZE], k=2)
    answers = SimilarAnswers(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), k=2)
    sources = [RetrievedDocuments(), EarlierTurns(), answers]
    original = RetrievalCopyChain(found, QuotingModel(), references=sources, prediction=True)
    for one in (original, WithCitations(original)):
        answer = copied(one).invoke(QUESTION)
        assert answer.response_metadata["citations"]
        assert essence(answer) == essence(one.invoke(QUESTION))


@COPIES
def test_a_chain_over_a_named_model_can_be_copied(copied: Callable[[Any], Any]) -> None:
    found = BM25Retriever(documents=[CLAY])
    chain = copied(
        RetrievalCopyChain(found, "openai:gpt-4.1-mini", api_key="none", base_url="http://127.0.0.1:1")
    )
    assert chain.model_name == "gpt-4.1-mini"
    assert chain.options.transport == "prediction"
    assert chain.options.count("窑炉") == 2
    assert copied(SentenceEmbeddings("folder")).path == "folder"


def test_a_lone_surrogate_in_a_question_is_cleaned(model: QuotingModel) -> None:
    queries: list[str] = []

    def search(query: str) -> list[Document]:
        queries.append(query)
        return [CLAY]

    RetrievalCopyChain(RunnableLambda(search), model).invoke("When may \udcff the kiln be opened?")
    assert queries == ["When may \ufffd the kiln be opened?"]
    assert model.requests[-1][-1].text.endswith(queries[0])


# Requests, loops and support ------------------------------------------------------------------------


def test_the_request_shows_an_answer_and_ends_with_the_question(
    quoting: RetrievalCopyChain, model: QuotingModel
) -> None:
    quoting.invoke(QUESTION)
    shown, answered, asked = model.requests[-1]
    assert (shown.type, answered.type, asked.type) == ("human", "ai", "human")
    assert "[1]" in shown.text
    assert answered.text.split(". ")[0] in shown.text
    assert f"[1] # Clay\n{CLAY.page_content}\n\n[2] {GLAZE.page_content}" in asked.text
    assert asked.text.endswith(f"Question: {QUESTION}")
    assert NOT_HELD in asked.text


async def all_ways(chain: RetrievalCopyChain, question: str) -> list[AIMessage]:
    return [
        chain.invoke(question),
        await chain.ainvoke(question),
        summed(list(chain.stream(question))),
        summed([chunk async for chunk in chain.astream(question)]),
    ]


async def test_an_answer_ends_before_it_repeats_itself_without_end() -> None:
    said = "The kiln may be opened once the cone reads eighty degrees, as they say. "
    model = QuotingModel(answer=lambda messages: "Indeed. " + said * 20 + "End.")
    looping = RetrievalCopyChain(retriever(CLAY), model)
    first, *others = await all_ways(looping, QUESTION)
    assert first.text.startswith("Indeed. The kiln may be opened")
    assert first.text.endswith("as they say.")
    assert first.text.count("eighty degrees") <= 2
    assert first.response_metadata["retrieval"]["stopped_by"] == "loop"
    assert first.usage_metadata is not None
    assert [essence(one) for one in others] == [essence(first)] * 3
    plain = RetrievalCopyChain(None, model)  # not an answer from documents: as the model wrote it
    assert all(one.text.count("eighty degrees") == 20 for one in await all_ways(plain, QUESTION))


@pytest.mark.parametrize(
    ("question", "said", "supported"),
    [
        (QUESTION, "The kiln may be opened once the cone reads eighty degrees.", True),
        (QUESTION, "At eighty degrees.", True),
        (QUESTION, "Whenever you feel like it, preferably on Thursdays.", False),
        (QUESTION, NOT_HELD, False),
        ("Who painted the ceiling?", "The kiln may be opened once the cone reads eighty degrees.", False),
    ],
)
async def test_an_answer_that_the_passages_do_not_support_is_marked(
    question: str, said: str, supported: bool
) -> None:
    chain = RetrievalCopyChain(retriever(CLAY, GLAZE), QuotingModel(answer=lambda messages: said))
    for answer in await all_ways(chain, question):
        assert answer.text == said
        assert answer.response_metadata["retrieval"]["supported"] is supported


def test_where_no_passages_are_asked_for_none_support_the_answer(model: QuotingModel) -> None:
    def supported(chain: RetrievalCopyChain, **arguments: Any) -> bool | None:
        trace = chain.invoke(QUESTION, **arguments).response_metadata["retrieval"]
        return cast("bool | None", trace["supported"])

    assert supported(RetrievalCopyChain(None, model)) is None
    assert supported(RetrievalCopyChain(retriever(CLAY), model), retrieve=False) is None
    assert supported(RetrievalCopyChain(retriever(), model)) is False


async def test_an_unsupported_answer_may_be_refused() -> None:
    model = QuotingModel(answer=lambda messages: "Whenever you feel like it, preferably on Thursdays.")
    refusing = RetrievalCopyChain(retriever(CLAY), model, on_unsupported="refuse")
    first, *others = await all_ways(refusing, QUESTION)
    assert first.text == REFUSAL
    assert first.response_metadata["retrieval"]["acted"] == "refused"
    assert first.response_metadata["citations"] == []
    assert [essence(one) for one in others] == [essence(first)] * 3
    assert RetrievalCopyChain(retriever(), model, on_unsupported="refuse").invoke(QUESTION).text == REFUSAL
    quoting = RetrievalCopyChain(retriever(CLAY), QuotingModel(), on_unsupported="refuse")
    assert quoting.invoke(QUESTION).response_metadata["retrieval"]["acted"] is None
    assert "".join(chunk.text for chunk in quoting.stream(QUESTION)) == quoting.invoke(QUESTION).text


async def test_what_may_be_refused_streams_once_that_is_excluded() -> None:
    said = f"{GLAZE.page_content.partition('. ')[2]} Then wait. Be patient."
    model = QuotingModel(answer=lambda messages: said)
    chain = RetrievalCopyChain(retriever(CLAY, GLAZE), model, on_unsupported="refuse")
    first, *others = [chunk async for chunk in chain.astream(QUESTION)]
    assert first.text.rstrip() == said.partition(" Then")[0] + " Then"  # the word after the sentence tells
    assert len([chunk for chunk in others if chunk.text]) >= 2
    whole = chain.invoke(QUESTION)
    assert essence(summed([first, *others])) == essence(whole)
    assert whole.response_metadata["retrieval"]["acted"] is None
    # What is taken back later has been read: it is marked, and stays.
    model.answer = lambda messages: f"{said} {NOT_HELD}"
    streamed = summed([chunk async for chunk in chain.astream(QUESTION)])
    assert streamed.text == f"{said} {NOT_HELD}"
    assert streamed.response_metadata["retrieval"] == {
        **chain.invoke(QUESTION).response_metadata["retrieval"],
        "acted": None,
    }
    assert streamed.response_metadata["retrieval"]["supported"] is False
    without = [chunk async for chunk in chain.astream(QUESTION, retrieve=False)]
    assert len(without) > 3  # nothing is refused where nothing was to be retrieved


def test_other_ways_to_act_are_refused() -> None:
    with pytest.raises(ValueError, match="on_unsupported must be one of"):
        RetrievalCopyChain(None, QuotingModel(), on_unsupported="retry")  # type: ignore[arg-type]  # what is refused


# Composition ---------------------------------------------------------------------------------------


async def test_each_point_of_a_skeleton_retrieves_for_itself() -> None:
    queries: list[str] = []

    def search(query: str) -> list[Document]:
        queries.append(query)
        return [CLAY]

    paced = sot_fakes.PacedChatModel()
    sot = SkeletonOfThought(RetrievalCopyChain(RunnableLambda(search), paced), router="always")
    message = await sot.ainvoke(sot_fakes.QUESTION)
    assert message.response_metadata["sot"]["route"] == "sot"
    num_points = len(message.response_metadata["sot"]["points"])
    assert num_points == 3
    assert len(queries) == 1 + num_points
    assert len(set(queries)) == 1 + num_points


def test_what_is_searched_for_may_be_less_than_what_is_asked(model: QuotingModel) -> None:
    queries: list[str] = []

    def search(query: str) -> list[Document]:
        queries.append(query)
        return [CLAY]

    asked = f"Be brief.\n{QUESTION}"
    for make in (lambda request: request.splitlines()[-1], lambda request: ""):
        RetrievalCopyChain(RunnableLambda(search), model, query=make).invoke(asked)
    assert queries == [QUESTION, asked]  # an empty query would find nothing: all of it is searched for
    assert all(asked in messages[-1].text for messages in model.requests)


def test_a_reply_begun_by_the_user_is_passed_on_and_searched_with() -> None:
    queries: list[str] = []
    model = QuotingModel(supports_assistant_prefill=True)
    continuing = RetrievalCopyChain(RunnableLambda(lambda query: queries.append(query) or [CLAY]), model)
    assert continuing.supports_assistant_prefill
    assert not RetrievalCopyChain(None, QuotingModel()).supports_assistant_prefill
    continuing.invoke([HumanMessage(QUESTION), AIMessage("2. Cones:")])
    assert queries == [f"{QUESTION} 2. Cones:"]
    assert model.requests[-1][-1].text == "2. Cones:"


def test_a_fake_list_model_is_any_chat_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        answer = RetrievalCopyChain(retriever(CLAY), FakeListChatModel(responses=["x"])).invoke(QUESTION)
    assert answer.text == "x"
    assert answer.response_metadata["retrieval"]["copied_as"] is None
    assert not caplog.records


async def test_in_langgraph_the_answer_streams_once(quoting: RetrievalCopyChain) -> None:
    async def node(state: MessagesState, config: RunnableConfig) -> dict[str, list[AIMessage]]:
        return {"messages": [await quoting.ainvoke(state["messages"], config)]}

    builder = StateGraph(MessagesState)
    builder.add_node("answer", node)
    builder.add_edge(START, "answer")
    graph = builder.compile()
    pieces = [
        chunk.text
        async for chunk, _ in graph.astream({"messages": HISTORY}, stream_mode="messages")
        if isinstance(chunk, AIMessageChunk)
    ]
    final = await graph.ainvoke({"messages": HISTORY})
    assert len(pieces) > 10
    assert "".join(pieces) == final["messages"][-1].text
    assert final["messages"][-1].response_metadata["citations"]
