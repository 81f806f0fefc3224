"""Sources of references: retrieved documents, answers to similar questions, earlier turns.

These are the three cases of the LLM Accelerator (arXiv 2304.04487, section 2). References never change an
answer, they only speed it up; so a source that fails is skipped with a warning in the log.
Knows texts, documents and vector stores. Does not know models or how copying works.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore

from retrieval_copy.citations.words import normalised

_NAMESPACE = uuid.UUID("8e2bcb0c-6d0a-4c5e-9a3e-2f6f3c0c5a11")
_ANSWER = "answer"
_READABLE_CHARACTERS = 300
_RUBBISH = re.compile("[\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]")


class RetrievalError(RuntimeError):
    """Documents could not be retrieved; the message names the retriever and what to check."""


@dataclass(frozen=True)
class Situation:
    """What a reference source may choose its texts by."""

    question: str  # the standalone one
    history: Sequence[BaseMessage]  # earlier turns
    documents: Sequence[Document]  # retrieved for the question, in order
    config: RunnableConfig | None = None  # of the chain's run, for retrievers


@runtime_checkable
class ReferenceSource(Protocol):
    """A source of texts that answers may be copied from."""

    async def atexts(self, situation: Situation) -> Iterable[str]:
        """The texts that may be copied, most likely first.

        Raises:
            RetrievalError: They could not be retrieved; the answer is then written without them.
        """
        ...


class RetrievedDocuments(ReferenceSource):
    """The documents retrieved for the question, in full even if the prompt shows only a part."""

    async def atexts(self, situation: Situation) -> list[str]:
        """Their texts, in the order of retrieval."""
        return [document.page_content for document in situation.documents]


class EarlierTurns(ReferenceSource):
    """The earlier turns: an edited answer repeats most of the one before."""

    async def atexts(self, situation: Situation) -> list[str]:
        """The texts of all turns, latest first."""
        return [str(message.text) for message in reversed(situation.history)]


class SimilarAnswers(ReferenceSource):
    """Answers given earlier to similar questions, kept in a vector store.

    Args:
        store: Any LangChain vector store; use a separate collection.
        k: Number of nearest answers to use.
        remember: Whether a chain adds its own answers.

    Raises:
        ValueError: ``k`` is below 1.
    """

    def __init__(self, store: VectorStore, *, k: int = 3, remember: bool = True) -> None:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        self.store = store
        self.k = k
        self.remember = remember
        self._lock = threading.Lock()
        self._retriever = store.as_retriever(search_kwargs={"k": k})

    def __reduce__(self) -> tuple[partial[SimilarAnswers], tuple[VectorStore]]:
        return partial(type(self), k=self.k, remember=self.remember), (self.store,)  # a lock cannot be copied

    async def atexts(self, situation: Situation) -> list[str]:
        """The answers to the most similar questions, nearest first."""
        found = await retrieved(self._retriever, situation.question, situation.config)
        return [str(document.metadata[_ANSWER]) for document in found if _ANSWER in document.metadata]

    def add(self, question: str, answer: str) -> None:
        """Stores an answer, replacing an earlier one to the same question."""
        if question.strip() and answer.strip():
            with self._lock:  # embedded stores, such as local Qdrant, allow one writer at a time
                name = " ".join(normalised(question).text.split()).casefold()
                identifier = str(uuid.uuid5(_NAMESPACE, name))
                self.store.add_texts([question], [{_ANSWER: answer}], ids=[identifier])

    async def aadd(self, question: str, answer: str) -> None:
        """Stores an answer, replacing an earlier one to the same question."""
        await run_in_executor(None, self.add, question, answer)


async def retrieved(
    retriever: Runnable[str, list[Document]], query: str, config: RunnableConfig | None = None
) -> list[Document]:
    """Asks ``retriever`` for documents.

    Raises:
        RetrievalError: It failed, or returned something else.
    """
    name = retriever.get_name()
    try:
        found = await retriever.ainvoke(query, config)
    except Exception as error:  # stores raise many types; report them as one
        said = " ".join(str(error).split())[:_READABLE_CHARACTERS]
        raise RetrievalError(
            f"{name} could not be asked for documents ({type(error).__name__}: {said}); "
            "check that its store is running and reachable and has the collection"
        ) from error
    if not isinstance(found, list) or not all(isinstance(document, Document) for document in found):
        raise RetrievalError(f"{name} must return a list of LangChain documents, got {found!r:.80}")
    return found


def gathered(texts: Iterable[str], *, max_characters: int) -> list[str]:
    """Cleans ``texts``, drops duplicates and blank ones, and keeps as many as fit, at least the first.

    A text is never cut, so a copy can continue to its end.
    """
    kept: dict[str, None] = {}
    num_characters = 0
    for text in map(cleaned, texts):
        if text in kept or not text.strip():
            continue
        num_characters += len(text)
        if kept and num_characters > max_characters:
            break
        kept[text] = None
    return list(kept)


def cleaned(text: str) -> str:
    """Replaces lone surrogates and control characters, one for one, so that offsets stay the same.

    Tokenizers reject the former and models do not write the latter; binary data in documents has both.
    """
    return _RUBBISH.sub("\ufffd", text)
