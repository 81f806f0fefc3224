"""Where references come from: similar answers above all, over a vector store nobody here wrote."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.vectorstores import InMemoryVectorStore

from retrieval_copy import (
    EarlierTurns,
    ReferenceSource,
    RetrievalCopyChain,
    RetrievedDocuments,
    SimilarAnswers,
    Situation,
)
from retrieval_copy.references import cleaned, gathered
from tests.retrieval_copy.fakes import CLAY, QUESTION, QuotingModel, retriever


def store() -> InMemoryVectorStore:
    return InMemoryVectorStore(DeterministicFakeEmbedding(size=32))


async def similar_texts(answers: SimilarAnswers, question: str) -> list[str]:
    return await answers.atexts(Situation(question, (), ()))


async def test_similar_answers_come_nearest_first_and_replace_older_ones() -> None:
    answers = SimilarAnswers(store(), k=2)
    for question in ("When to fire?", "How to glaze?", QUESTION):
        answers.add(question, f"An answer to: {question}")
    assert (await similar_texts(answers, QUESTION))[0] == f"An answer to: {QUESTION}"
    assert len(await similar_texts(answers, QUESTION)) == 2
    answers.add(f"  {QUESTION.upper()} ", "A newer answer.")
    assert len(answers.store.store) == 3  # type: ignore[attr-defined]  # of InMemoryVectorStore
    answers.add(QUESTION, "  ")
    assert len(answers.store.store) == 3  # type: ignore[attr-defined]  # of InMemoryVectorStore


async def test_a_chain_remembers_its_answers_but_never_returns_one() -> None:
    for call in ("invoke", "stream", "ainvoke", "astream"):
        answers = SimilarAnswers(store())
        chain = RetrievalCopyChain(retriever(CLAY), QuotingModel(), references=[answers])
        answers.add(QUESTION, "Something else entirely.")
        if call == "invoke":
            text = chain.invoke(QUESTION).text
        elif call == "stream":
            text = "".join(chunk.text for chunk in chain.stream(QUESTION))
        elif call == "ainvoke":
            text = (await chain.ainvoke(QUESTION)).text
        else:
            text = "".join([chunk.text async for chunk in chain.astream(QUESTION)])
        assert text.startswith("It is written")
        assert await similar_texts(answers, QUESTION) == [text]


async def test_nothing_is_remembered_where_that_is_not_wanted() -> None:
    answers = SimilarAnswers(store(), remember=False)
    RetrievalCopyChain(retriever(CLAY), QuotingModel(), references=[answers]).invoke(QUESTION)
    assert await similar_texts(answers, QUESTION) == []


def test_a_store_of_answers_that_is_down_costs_the_answer_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("down")

    async def afail(*args: Any, **kwargs: Any) -> Any:
        fail()

    broken = store()
    monkeypatch.setattr(broken, "asimilarity_search", afail)
    monkeypatch.setattr(broken, "add_texts", fail)
    chain = RetrievalCopyChain(
        retriever(CLAY), QuotingModel(), references=[SimilarAnswers(broken)], prediction=True
    )
    with caplog.at_level(logging.WARNING):
        answer = chain.invoke(QUESTION)
    assert answer.text.startswith("It is written")
    assert "no references from SimilarAnswers" in caplog.text
    assert "could not be kept" in caplog.text


async def test_the_latest_turns_come_first() -> None:
    history = [HumanMessage("one"), AIMessage("two"), HumanMessage("three")]
    situation = Situation("?", history, [CLAY])
    assert await EarlierTurns().atexts(situation) == ["three", "two", "one"]
    assert await RetrievedDocuments().atexts(situation) == [CLAY.page_content]
    for source in (EarlierTurns(), RetrievedDocuments(), SimilarAnswers(store())):
        assert isinstance(source, ReferenceSource)


def test_k_is_checked() -> None:
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        SimilarAnswers(store(), k=0)


def test_references_are_kept_whole_once_and_within_bounds() -> None:
    assert gathered(["a" * 50, " ", "b" * 3, "a" * 50, "c"], max_characters=10) == ["a" * 50]
    assert gathered(["aa", "bb", "aa", "cc"], max_characters=4) == ["aa", "bb"]
    assert gathered([], max_characters=4) == []


@given(st.text())
def test_cleaning_keeps_every_place_and_leaves_nothing_unsendable(text: str) -> None:
    clean = cleaned(text)
    assert len(clean) == len(text)
    clean.encode()
    assert not set(clean) & set(map(chr, [*range(9), *range(14, 32), 127]))
