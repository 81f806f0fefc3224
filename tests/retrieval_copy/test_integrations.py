"""The chain as an agent's tool, a graph's node and a retrieval chain, and over LangChain's retrievers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_classic.retrievers import ContextualCompressionRetriever, EnsembleRetriever
from langchain_classic.retrievers.document_compressors import LLMChainExtractor, LLMChainFilter
from langchain_core.callbacks import CallbackManagerForLLMRun, UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.load import dumpd, load
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    ToolMessage,
    messages_from_dict,
    messages_to_dict,
)
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

from local_backend import ChatLocal
from retrieval_copy import (
    BM25Retriever,
    RetrievalCopyChain,
    SimilarAnswers,
    citing_node,
    citing_tool,
    retrieval_chain,
)
from tests.retrieval_copy.fakes import CLAY, GLAZE, QUESTION, QuotingModel, assert_literal, retriever

KILN = Document(
    "The kiln may be opened once the cone reads eighty degrees, and never while it glows. "
    "Only members of the firing team may open it.",
    id="kiln",
    metadata={"source": "handbook.pdf", "page": 7},
)
HISTORY = [HumanMessage("Tell me about kilns."), AIMessage("They are hot.")]


@pytest.fixture
def quoting() -> RetrievalCopyChain:
    return RetrievalCopyChain(retriever(CLAY, GLAZE), QuotingModel())


@pytest.fixture
def on_default_model(default_copying: ChatLocal) -> RetrievalCopyChain:
    return RetrievalCopyChain(retriever(KILN), default_copying, min_citation_tokens=4)


def summed(chunks: Sequence[Any]) -> Any:
    return reduce(add, chunks)


# The tool ------------------------------------------------------------------------------------------


class AskingModel(BaseChatModel):
    """Calls its first tool with the user's question, and then repeats what the tool said."""

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, AIMessage]:
        return self.bind(tool=tools[0].name)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        tool: str = "",
        **kwargs: Any,
    ) -> ChatResult:
        last = messages[-1]
        if isinstance(last, ToolMessage):
            answer = AIMessage(f"The documents say: {last.text}")
        else:
            answer = AIMessage(
                "",
                tool_calls=[{"name": tool, "args": {"question": last.text}, "id": "1", "type": "tool_call"}],
            )
        return ChatResult(generations=[ChatGeneration(message=answer)])

    @property
    def _llm_type(self) -> str:
        return "asking"


async def test_an_agent_asks_the_documents_and_the_citations_are_the_artifact(
    on_default_model: RetrievalCopyChain,
) -> None:
    """The tool runs on the default model; it has no tool calls, so what decides to call it is scripted."""
    tool = citing_tool(on_default_model, name="ask_handbook", description="The studio's handbook.")
    agent = create_agent(AskingModel(), [tool])
    expected = on_default_model.invoke(QUESTION)
    for result in (
        agent.invoke({"messages": [HumanMessage(QUESTION)]}),
        await agent.ainvoke({"messages": [HumanMessage(QUESTION)]}),
    ):
        (message,) = [message for message in result["messages"] if isinstance(message, ToolMessage)]
        assert (message.name, message.status) == ("ask_handbook", "success")
        assert message.artifact == expected.response_metadata["citations"]
        assert message.artifact, "a question whose answer stands in the passage is answered with a quotation"
        assert message.text == f"{expected.text}\n\nSources:\n[1] handbook.pdf, page 7"
        assert result["messages"][-1].text == f"The documents say: {message.text}"


def test_the_offsets_of_the_artifact_are_those_of_the_tool_message(quoting: RetrievalCopyChain) -> None:
    tool = citing_tool(quoting)
    call = {"name": tool.name, "args": {"question": QUESTION}, "id": "1", "type": "tool_call"}
    message = tool.invoke(call)
    assert isinstance(message, ToolMessage)
    assert len(message.artifact) == 2
    for citation in message.artifact:
        assert message.text[citation["start"] : citation["end"]] == citation["text"]
    json.dumps(message.artifact)
    assert list(tool.args) == ["question"]


def test_a_tool_without_passages_says_so() -> None:
    tool = citing_tool(RetrievalCopyChain(retriever(), QuotingModel()))
    message = tool.invoke({"name": tool.name, "args": {"question": "Why?"}, "id": "1", "type": "tool_call"})
    assert message.text == "Nothing is known about Why?\n\nThe documents do not support this answer."
    assert message.artifact == []


# The node ------------------------------------------------------------------------------------------


def graph_of(chain: Runnable[Any, AIMessage], **options: Any) -> CompiledStateGraph[Any, Any, Any, Any]:
    builder = StateGraph(MessagesState)
    builder.add_node("answer", citing_node(chain))
    builder.add_edge(START, "answer")
    return builder.compile(**options)


async def test_a_node_streams_tokens_and_then_the_citations(on_default_model: RetrievalCopyChain) -> None:
    graph = graph_of(on_default_model)
    asked = {"messages": [HumanMessage(QUESTION)]}
    answer = (await graph.ainvoke(asked))["messages"][-1]
    assert answer.response_metadata["citations"]
    streams = (
        [chunk for chunk, _ in graph.stream(asked, stream_mode="messages")],
        [chunk async for chunk, _ in graph.astream(asked, stream_mode="messages")],
    )
    for chunks in streams:
        assert len(chunks) > 3
        assert len({chunk.id for chunk in chunks}) == 1
        assert not any("citations" in chunk.response_metadata for chunk in chunks[:-1])
        for message in (chunks[-1], summed(chunks)):
            assert message.response_metadata["citations"] == answer.response_metadata["citations"]
            (block,) = message.content_blocks
            assert block["annotations"] == answer.content_blocks[0]["annotations"]
        whole = summed(chunks)
        assert whole.text == answer.text
        assert whole.usage_metadata == answer.usage_metadata, "nothing is counted twice"


@pytest.mark.parametrize("on_unsupported", ["retry", "refuse"])
def test_an_answer_that_is_shown_when_it_is_whole_streams_once(on_unsupported: Any) -> None:
    chain = RetrievalCopyChain(retriever(CLAY), QuotingModel(), on_unsupported=on_unsupported)
    graph = graph_of(chain)
    for question in (QUESTION, "Why is the price of wheat so high?"):
        asked = {"messages": [HumanMessage(question)]}
        streamed = [chunk for chunk, _ in graph.stream(asked, stream_mode="messages")]
        answer = graph.invoke(asked)["messages"][-1]
        assert "".join(chunk.text for chunk in streamed) == answer.text
        assert streamed[-1].response_metadata["citations"] == answer.response_metadata["citations"]


class HostedModel(QuotingModel):
    """Names its provider in every chunk, as the models of LangChain's partners do."""

    def _pieces(self, messages: list[BaseMessage], kwargs: dict[str, Any]) -> Iterator[AIMessageChunk]:
        for chunk in super()._pieces(messages, kwargs):
            chunk.response_metadata["model_provider"] = "openai"
            yield chunk


def test_the_sum_of_what_streams_is_annotated_whoever_provides_the_model() -> None:
    graph = graph_of(RetrievalCopyChain(retriever(CLAY, GLAZE), HostedModel()))
    asked = {"messages": [HumanMessage(QUESTION)]}
    whole = summed([chunk for chunk, _ in graph.stream(asked, stream_mode="messages")])
    assert whole.content_blocks == graph.invoke(asked)["messages"][-1].content_blocks
    assert whole.content_blocks[0]["annotations"]


async def test_what_a_node_adds_to_the_stream_is_no_run_to_who_counts(quoting: RetrievalCopyChain) -> None:
    counting = UsageMetadataCallbackHandler()
    graph = graph_of(quoting)
    asked = {"messages": [*HISTORY, HumanMessage("And to open one?")]}
    events = [event async for event in graph.astream_events(asked, {"callbacks": [counting]}, version="v2")]
    assert [event["name"] for event in events if event["event"] == "on_chat_model_stream"][-1] == "citations"
    plain = [chunk for chunk, _ in graph.stream(asked, stream_mode="messages")]
    assert isinstance(plain[-1], AIMessageChunk)
    assert graph.invoke(asked)["messages"][-1].text == summed(plain).text
    assert not counting.usage_metadata  # this model has no name to count under


# Citations as annotations --------------------------------------------------------------------------


def through_checkpoint(message: AIMessage) -> BaseMessage:
    saver = InMemorySaver()
    kept = saver.serde.loads_typed(saver.serde.dumps_typed(message))
    assert isinstance(kept, AIMessage)
    return kept


@pytest.mark.filterwarnings("ignore:.*`load` is in beta")
@pytest.mark.parametrize(
    "through",
    [
        lambda message: load(dumpd(message), allowed_objects="core"),
        lambda message: messages_from_dict(json.loads(json.dumps(messages_to_dict([message]))))[0],
        lambda message: AIMessage.model_validate_json(message.model_dump_json()),
        through_checkpoint,
    ],
    ids=["langchain's load", "messages_to_dict", "pydantic", "langgraph's checkpoints"],
)
def test_annotations_survive(through: Callable[[AIMessage], AIMessage]) -> None:
    message = RetrievalCopyChain(retriever(KILN, GLAZE), QuotingModel()).invoke(QUESTION)
    (block,) = through(message).content_blocks
    assert block == message.content_blocks[0]
    first, *_ = block["annotations"]
    assert (first["type"], first["title"]) == ("citation", "handbook.pdf")
    assert (first["extras"]["source"], first["extras"]["page"]) == ("handbook.pdf", 7)
    assert message.text[first["start_index"] : first["end_index"]] == first["cited_text"]


# The retrieval chain -------------------------------------------------------------------------------


async def test_it_has_the_names_of_create_retrieval_chain(quoting: RetrievalCopyChain) -> None:
    chain = retrieval_chain(quoting)
    given = {"input": QUESTION, "chat_history": [("human", "Tell me."), ("ai", "They are hot.")], "user": 3}
    result = chain.invoke(given)
    assert list(result) == ["input", "chat_history", "user", "context", "answer", "message"]
    assert result["context"] == [CLAY, GLAZE]
    assert result["answer"] == result["message"].text
    assert result["message"].response_metadata["retrieval"]["question"] == QUESTION
    assert_literal(result["message"], result["context"])
    expected = {key: result[key] for key in ("context", "answer", "user")}
    for other in (
        await chain.ainvoke(given),
        *chain.batch([given]),
        summed(list(chain.stream(given))),
        summed([part async for part in chain.astream(given)]),
    ):
        assert {key: other[key] for key in expected} == expected
        assert (
            other["message"].response_metadata["citations"]
            == result["message"].response_metadata["citations"]
        )
        assert other["message"].content_blocks == result["message"].content_blocks


def test_it_streams_the_context_before_the_answer(quoting: RetrievalCopyChain) -> None:
    parts = [key for part in retrieval_chain(quoting).stream({"input": QUESTION}) for key in part]
    assert parts[:2] == ["input", "context"]
    assert set(parts[2:-1]) == {"answer"}
    assert parts[-1] == "message"
    sequence = retrieval_chain(quoting).pick("answer")
    assert len(list(sequence.stream({"input": QUESTION}))) == len(parts) - 3


def test_the_context_is_what_the_retriever_of_the_chain_returns() -> None:
    """Not what retrievers within it do, nor what is retrieved to copy from."""
    bm25 = BM25Retriever(documents=[CLAY, GLAZE], k=2)
    fixed = BM25Retriever(documents=[KILN], k=1)
    ensemble = EnsembleRetriever(retrievers=[fixed, bm25], weights=[0.6, 0.4])
    answers = SimilarAnswers(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)))
    chain = RetrievalCopyChain(ensemble, QuotingModel(), references=[answers], prediction=True)
    for _ in range(2):
        result = retrieval_chain(chain).invoke({"input": QUESTION})
        assert result["context"] == ensemble.invoke(QUESTION)
    assert (
        retrieval_chain(RetrievalCopyChain(None, QuotingModel())).invoke({"input": "Why?"})["context"] == []
    )


# LangChain's retrievers ----------------------------------------------------------------------------

NOTES = [CLAY, GLAZE, KILN, Document("Wheels are cleaned with a sponge.", id="wheels")]


def store() -> InMemoryVectorStore:
    made = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
    made.add_documents(NOTES)
    return made


def mmr() -> BaseRetriever:
    return store().as_retriever(search_type="mmr", search_kwargs={"k": 3, "fetch_k": 4})


def ensemble() -> BaseRetriever:
    return EnsembleRetriever(retrievers=[BM25Retriever(documents=NOTES, k=3), mmr()], weights=[0.7, 0.3])


def filtering() -> BaseRetriever:
    keep = LLMChainFilter.from_llm(FakeListChatModel(responses=["YES"]))
    return ContextualCompressionRetriever(base_compressor=keep, base_retriever=ensemble())


def extracting() -> BaseRetriever:
    """Shortens each document to what a model repeats of it, so citations refer to the shortened text."""
    sentence = "The kiln may be opened once the cone reads eighty degrees"
    extract = LLMChainExtractor.from_llm(FakeListChatModel(responses=[sentence]))
    return ContextualCompressionRetriever(
        base_compressor=extract, base_retriever=BM25Retriever(documents=NOTES, k=2)
    )


@pytest.mark.parametrize("make", [mmr, ensemble, filtering, extracting], ids=lambda make: make.__name__)
async def test_any_retriever_of_langchain_serves(make: Callable[[], BaseRetriever]) -> None:
    chain = retrieval_chain(RetrievalCopyChain(make(), QuotingModel(), min_citation_tokens=3))
    for result in (chain.invoke({"input": QUESTION}), await chain.ainvoke({"input": QUESTION})):
        assert result["context"]
        assert result["message"].response_metadata["citations"]
        assert_literal(result["message"], result["context"], min_tokens=3)
