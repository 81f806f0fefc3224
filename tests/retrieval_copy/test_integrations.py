"""The chain as an agent's tool, a graph's node and a retrieval chain, and over LangChain's retrievers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever, EnsembleRetriever
from langchain_classic.retrievers.document_compressors import LLMChainExtractor, LLMChainFilter
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListChatModel
from langchain_core.load import dumpd, load
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    messages_from_dict,
    messages_to_dict,
)
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


# A node --------------------------------------------------------------------------------------------


def graph_of(chain: Runnable[Any, AIMessage], **options: Any) -> CompiledStateGraph[Any, Any, Any, Any]:
    builder = StateGraph(MessagesState)
    builder.add_node("answer", lambda state: {"messages": [chain.invoke(state["messages"])]})
    builder.add_edge(START, "answer")
    return builder.compile(**options)


async def test_a_node_is_one_line_that_streams_tokens_and_keeps_citations(
    on_default_model: RetrievalCopyChain,
) -> None:
    graph = graph_of(on_default_model)
    asked = {"messages": [HumanMessage(QUESTION)]}
    answer = (await graph.ainvoke(asked))["messages"][-1]
    assert answer.response_metadata["citations"]
    chunks = [chunk async for chunk, _ in graph.astream(asked, stream_mode="messages")]
    assert len(chunks) >= 2  # what is copied may come at once, but not with the end
    assert summed(chunks).text == answer.text


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
    found = make()
    chain = RetrievalCopyChain(found, QuotingModel(), min_citation_tokens=3)
    for answer in (chain.invoke(QUESTION), await chain.ainvoke(QUESTION)):
        assert answer.response_metadata["retrieval"]["num_documents"] > 0
        assert_literal(answer, found.invoke(QUESTION), min_tokens=3)
