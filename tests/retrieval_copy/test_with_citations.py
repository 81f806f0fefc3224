"""Citations of a whole whose parts retrieve for themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.retrievers import BaseRetriever

from retrieval_copy import BM25Retriever, RetrievalCopyChain, WithCitations
from sot_chains import SkeletonOfThought
from tests.retrieval_copy.fakes import CLAY, GLAZE, QUESTION, QuotingModel, quoting_answer, retriever
from tests.sot_chains import fakes as sot_fakes

DOCUMENTS = [
    Document("Fixed hours of sleep are worth more than many hours.", id="h", metadata={"source": "b"}),
    Document("A dark room tells the body that the day is over at last.", id="r", metadata={"source": "c"}),
    Document("Less coffee after noon means an easier evening.", id="c", metadata={"source": "a"}),
]


@pytest.fixture
def found() -> BaseRetriever:
    return BM25Retriever(documents=DOCUMENTS, k=1)


def outline_or_quote(messages: Sequence[BaseMessage]) -> str:
    asked = str(messages[-1].text)
    return sot_fakes.OUTLINE if sot_fakes.is_skeleton_request(asked) else quoting_answer(messages)


async def test_every_point_of_a_skeleton_is_cited_in_the_whole_answer() -> None:
    chain = RetrievalCopyChain(retriever(CLAY, GLAZE), QuotingModel(answer=outline_or_quote))
    whole = WithCitations(SkeletonOfThought(chain, router="always"))
    answer = whole.invoke(QUESTION)
    assert len(answer.response_metadata["sot"]["points"]) == 3
    assert len(answer.response_metadata["citations"]) >= 3
    for citation in answer.response_metadata["citations"]:
        document = next(document for document in (CLAY, GLAZE) if document.id == citation["document_id"])
        assert answer.text[citation["start"] : citation["end"]] == citation["text"]
        place = slice(citation["document_start"], citation["document_end"])
        assert document.page_content[place] == citation["text"]
    again = await whole.ainvoke(QUESTION)
    assert again.response_metadata["citations"] == answer.response_metadata["citations"]


async def test_in_a_stream_they_come_last(found: BaseRetriever) -> None:
    whole = WithCitations(RetrievalCopyChain(found, QuotingModel()), min_citation_tokens=3)
    asked = "How many hours of sleep?"
    answer = whole.invoke(asked)
    assert answer.response_metadata["citations"]
    for chunks in (list(whole.stream(asked)), [chunk async for chunk in whole.astream(asked)]):
        first, *others = chunks
        summed = first + others
        assert summed.text == answer.text
        assert summed.response_metadata["citations"] == answer.response_metadata["citations"]
        assert not any("citations" in chunk.response_metadata for chunk in chunks[:-1])
        assert summed.content_blocks == answer.content_blocks


def test_what_retrieves_nothing_has_no_citations() -> None:
    answer = WithCitations(QuotingModel()).invoke(QUESTION)
    assert isinstance(answer, AIMessage)
    assert answer.response_metadata["citations"] == []
    with pytest.raises(ValueError, match="at least 1, got 0"):
        WithCitations(QuotingModel(), min_citation_tokens=0)
