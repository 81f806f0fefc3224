"""Follow-ups in a conversation about a folder, answered by a model of one's own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.vectorstores import InMemoryVectorStore

from local_backend import ChatLocal
from retrieval_copy import FolderIndex, HybridRetriever, RetrievalCopyChain, SentenceEmbeddings

FOLDER = Path(__file__).parents[2] / "benchmarks" / "folder"
MODELS = [
    None,
    *filter(None, [os.environ.get("RAG_MODEL")]),
]  # the default model, and another one if it is named


@pytest.fixture(scope="module", params=MODELS)
def chain(request: pytest.FixtureRequest) -> Iterator[RetrievalCopyChain]:
    store = InMemoryVectorStore(SentenceEmbeddings())
    index = FolderIndex(FOLDER, store=store)
    index.update()
    with ChatLocal.from_pretrained(request.param, drafter="reference_copy") as chat:
        yield RetrievalCopyChain(HybridRetriever(documents=index.documents, store=store), chat)


@pytest.mark.slow
def test_a_follow_up_is_answered_with_what_it_refers_to(chain: RetrievalCopyChain) -> None:
    first = HumanMessage("What does the Birch room cost per day?")
    answer = chain.invoke([first, chain.invoke([first]), HumanMessage("And the Oak room?")])
    assert answer.response_metadata["retrieval"]["question"] == f"{first.text} And the Oak room?"
    assert "310" in answer.text


@pytest.mark.slow
def test_of_twenty_follow_ups_most_are_answered(chain: RetrievalCopyChain) -> None:
    lines = map(json.loads, (FOLDER / "follow_ups.jsonl").read_text("utf-8").splitlines())
    num_right = 0
    for line in lines:
        first = HumanMessage(line["first"])
        answer = chain.invoke([first, chain.invoke([first]), HumanMessage(line["question"])])
        num_right += any(one in " ".join(answer.text.split()) for one in line["answers"])
    assert num_right >= 16
