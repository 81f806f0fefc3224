"""With a real engine: references change how soon an answer comes, and nothing else.

What the model says is not looked at, so these hold for any weights: a text that it wrote once stands in
for the document that it quotes.
"""

from __future__ import annotations

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore

from local_backend import ChatLocal
from retrieval_copy import EarlierTurns, RetrievalCopyChain, RetrievedDocuments, SimilarAnswers
from sot_chains import SkeletonOfThought
from tests.retrieval_copy.fakes import CLAY, GLAZE, QUESTION, assert_literal, retriever
from tests.tiny import tiny_chat

ASKED = "How do I bake bread at home?"
MAX_TOKENS = 16
# Leaves the documents to the references alone.
QUESTION_ALONE = ChatPromptTemplate.from_messages([("user", "{question}")])
QUESTION_AND_TURNS = ChatPromptTemplate.from_messages([("placeholder", "{history}"), ("user", "{question}")])


@pytest.fixture(scope="module")
def chat(default_copying: ChatLocal) -> ChatLocal:
    return default_copying.model_copy(update={"max_tokens": MAX_TOKENS})


@pytest.fixture(scope="module")
def plain(default_chat: ChatLocal) -> ChatLocal:
    return default_chat.model_copy(update={"max_tokens": MAX_TOKENS})


@pytest.fixture(scope="module")
def written(plain: ChatLocal) -> str:
    """What the model says to the question, by itself."""
    return plain.invoke(ASKED).text


def forwards_of(message: AIMessage) -> int:
    forwards: int = message.response_metadata["decoding"]["num_forwards"]
    return forwards


@pytest.mark.parametrize(
    ("documents", "history"),
    [
        ([CLAY, GLAZE], []),
        ([CLAY] * 3, [HumanMessage("Hello."), AIMessage("Good day to you.")]),
        ([Document("窑炉" * 20), Document("\x00\udc80 x")], []),
    ],
    ids=["two", "one thrice, after a turn", "another language and rubbish"],
)
def test_answers_are_the_same_with_and_without_references(
    chat: ChatLocal, plain: ChatLocal, documents: list[Document], history: list[HumanMessage | AIMessage]
) -> None:
    asked = [*history, HumanMessage(QUESTION)]
    texts = {
        RetrievalCopyChain(retriever(*documents), model, references=references).invoke(asked).text
        for model, references in ((plain, ()), (chat, (RetrievedDocuments(), EarlierTurns())))
    }
    assert len(texts) == 1


def test_a_document_is_copied_from_and_cited(chat: ChatLocal, written: str) -> None:
    source = Document(f"An introduction that nobody quotes. {written} And an end.", id="source")
    copying = RetrievalCopyChain(retriever(CLAY, source), chat, prompt=QUESTION_ALONE)
    without = RetrievalCopyChain(retriever(CLAY, source), chat, prompt=QUESTION_ALONE, references=())
    answer, slow = copying.invoke(ASKED), without.invoke(ASKED)
    assert answer.text == slow.text == written
    assert answer.response_metadata["citations"] == slow.response_metadata["citations"]
    assert_literal(answer, [CLAY, source])
    assert max(citation["num_tokens"] for citation in answer.response_metadata["citations"]) > 8
    assert forwards_of(answer) * 2 < forwards_of(slow)


def test_a_document_larger_than_the_context_is_copied_from_to_its_end(chat: ChatLocal, written: str) -> None:
    filler = " ".join(f"Line {number} of a long ledger." for number in range(4_000))
    large = Document(f"{filler} {written}", id="large")
    answer = RetrievalCopyChain(retriever(large), chat, prompt=QUESTION_ALONE).invoke(ASKED)
    assert answer.text == written
    assert answer.response_metadata["citations"]
    assert_literal(answer, [large])
    assert forwards_of(answer) * 2 < MAX_TOKENS
    with tiny_chat("reference_copy", max_tokens=MAX_TOKENS) as small:  # which reads the nearest sentences
        shown = RetrievalCopyChain(retriever(large), small).invoke(QUESTION)
        assert shown.usage_metadata is not None
        assert 500 < shown.usage_metadata["input_tokens"] < small.engine.max_positions // 2


def test_a_similar_answer_is_copied_from_but_not_returned(chat: ChatLocal, written: str) -> None:
    answers = SimilarAnswers(InMemoryVectorStore(DeterministicFakeEmbedding(size=16)))
    chain = RetrievalCopyChain(None, chat, references=[answers])
    answers.add("What is it like to fire a kiln?", "It is hot work. " + written[: len(written) // 2])
    first = chain.invoke(ASKED)
    second = chain.invoke(ASKED)
    assert first.text == second.text == written
    assert forwards_of(second) < forwards_of(first)
    assert second.response_metadata["citations"] == []  # earlier answers are no documents


def test_earlier_turns_are_copied_from(chat: ChatLocal, written: str) -> None:
    told = [HumanMessage("Say something."), AIMessage(written), HumanMessage(ASKED)]
    forgetful = ChatPromptTemplate.from_messages([("user", "{asked}")])
    for references in ((EarlierTurns(),), ()):
        chain = RetrievalCopyChain(retriever(CLAY), chat, prompt=forgetful, references=references)
        answer = chain.invoke(told)
        assert answer.text == written
        assert (forwards_of(answer) * 2 < MAX_TOKENS) == bool(references)


async def test_many_calls_at_once_share_one_engine(chat: ChatLocal) -> None:
    chain = RetrievalCopyChain(retriever(CLAY, GLAZE), chat, references=(RetrievedDocuments(),))
    questions = [f"{QUESTION} ({number})" for number in range(3)]
    one_by_one = [chain.invoke(question, max_tokens=8).text for question in questions]
    assert [message.text for message in await chain.abatch(questions, max_tokens=8)] == one_by_one
    assert [message.text for message in chain.batch(questions, max_tokens=8)] == one_by_one


@pytest.mark.slow
def test_skeletons_compose_in_both_orders(chat: ChatLocal, plain: ChatLocal) -> None:
    for references in ((), (RetrievedDocuments(),)):
        inner = RetrievalCopyChain(  # the examples of a skeleton are earlier turns
            retriever(CLAY), chat, prompt=QUESTION_AND_TURNS, references=references
        )
        assert (
            SkeletonOfThought(inner, router="always").invoke(ASKED).text
            == SkeletonOfThought(plain, router="always").invoke(ASKED).text
        )
    outer = RetrievalCopyChain(
        retriever(CLAY), SkeletonOfThought(chat, router="always"), prompt=QUESTION_ALONE
    )
    answer = outer.invoke(ASKED)
    assert answer.response_metadata["retrieval"]["copied_as"] == "references"
    assert answer.text == SkeletonOfThought(plain, router="always").invoke(ASKED).text
    assert answer.response_metadata["citations"] == []
