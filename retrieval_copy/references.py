"""What an answer may be copied from: retrieved documents, answers to similar questions, earlier turns.

The three cases of the LLM Accelerator (arXiv 2304.04487, section 2). References never change an answer, they
only make it come sooner; so a source that fails is left out and said so in the log.
Knows texts, documents and vector stores. Does not know models, nor how copying works.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore

_NAMESPACE = uuid.UUID("8e2bcb0c-6d0a-4c5e-9a3e-2f6f3c0c5a11")
_ANSWER = "answer"
# From here on it pays more to read references once than to have a few more of them.
_LARGE_CHARACTERS = 200_000
_RUBBISH = re.compile("[\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]")


class Search(NamedTuple):
    """Something to look up: a retriever and what to ask it."""

    retriever: Runnable[str, list[Document]]
    query: str


@dataclass(frozen=True)
class Situation:
    """What is known when an answer is about to be written.

    Attributes:
        question: Stands alone.
        history: Earlier turns.
        documents: Retrieved for the question, in order.
        leaves_machine: Whether references are sent to somebody else's model, and billed there.
    """

    question: str
    history: Sequence[BaseMessage]
    documents: Sequence[Document]
    leaves_machine: bool = False


@runtime_checkable
class ReferenceSource(Protocol):
    """Something answers may be copied from."""

    def search(self, question: str) -> Search | None:
        """What to look up first, if anything."""
        ...

    def texts(self, situation: Situation, found: Sequence[Document]) -> Iterable[str]:
        """The texts that may be copied, the likeliest first.

        Args:
            situation: What is known.
            found: What came of :meth:`search`.
        """
        ...


@runtime_checkable
class RemembersAnswers(Protocol):
    """A source that learns from a chain's answers."""

    remember: bool

    def add(self, question: str, answer: str) -> None:
        """Keeps an answer."""
        ...

    async def aadd(self, question: str, answer: str) -> None:
        """Keeps an answer."""
        ...


class RetrievedDocuments:
    """The documents retrieved for the question, each in full, also where the prompt holds a part only."""

    def search(self, question: str) -> Search | None:
        """Nothing: the chain has retrieved them."""
        return None

    def texts(self, situation: Situation, found: Sequence[Document]) -> Iterator[str]:
        """Their texts, in the order of retrieval."""
        return (document.page_content for document in situation.documents)


class EarlierTurns:
    """What was said before: a request to edit an answer repeats most of it. The latest come first."""

    def search(self, question: str) -> Search | None:
        """Nothing: the conversation is known."""
        return None

    def texts(self, situation: Situation, found: Sequence[Document]) -> Iterator[str]:
        """The texts of all turns, latest first."""
        return (str(message.text) for message in reversed(situation.history))


class RecentAnswers:
    """A chain's last answers, for the turns of phrase that they have in common ("The documents say ...").

    They lie in memory and go to local models only. Beside very large documents they are left out, since
    references that are the same from call to call are read once.

    Args:
        keep: How many.

    Raises:
        ValueError: ``keep`` is below 1.
    """

    remember = True

    def __init__(self, keep: int = 8) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._answers: deque[str] = deque(maxlen=keep)

    def search(self, question: str) -> Search | None:
        """Nothing: they are at hand."""
        return None

    def texts(self, situation: Situation, found: Sequence[Document]) -> list[str]:
        """The answers, latest first."""
        num_characters = sum(len(document.page_content) for document in situation.documents)
        if situation.leaves_machine or num_characters > _LARGE_CHARACTERS:
            return []
        return list(self._answers)

    def add(self, question: str, answer: str) -> None:
        """Keeps an answer."""
        self._answers.appendleft(answer)

    async def aadd(self, question: str, answer: str) -> None:
        """Keeps an answer."""
        self.add(question, answer)


class SimilarAnswers:
    """Answers given earlier to similar questions, kept in a vector store.

    They are copied from where the model would write the same, and never returned in its place.

    Args:
        store: Any LangChain vector store; give it a collection of its own.
        k: How many of the nearest answers to take.
        remember: Whether a chain adds its own answers.

    Raises:
        ValueError: ``k`` is below 1.
    """

    def __init__(self, store: VectorStore, *, k: int = 3, remember: bool = True) -> None:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        self.store = store
        self.remember = remember
        self._lock = threading.Lock()
        self._retriever = store.as_retriever(search_kwargs={"k": k})

    def search(self, question: str) -> Search | None:
        """The nearest questions."""
        return Search(self._retriever, question)

    def texts(self, situation: Situation, found: Sequence[Document]) -> Iterator[str]:
        """Their answers, the nearest question's first."""
        return (str(document.metadata[_ANSWER]) for document in found if _ANSWER in document.metadata)

    def add(self, question: str, answer: str) -> None:
        """Keeps an answer; one to the same question takes its place."""
        if question.strip() and answer.strip():
            with self._lock:  # embedded stores, Qdrant's local mode among them, take one writer at a time
                self.store.add_texts([question], **_kept(question, answer))

    async def aadd(self, question: str, answer: str) -> None:
        """Keeps an answer; one to the same question takes its place."""
        if type(self.store).aadd_texts is VectorStore.aadd_texts:  # which is the other one, on a thread
            await run_in_executor(None, self.add, question, answer)
        elif question.strip() and answer.strip():
            await self.store.aadd_texts([question], **_kept(question, answer))


def _kept(question: str, answer: str) -> dict[str, Any]:
    identifier = str(uuid.uuid5(_NAMESPACE, " ".join(question.split()).casefold()))
    return {"metadatas": [{_ANSWER: answer}], "ids": [identifier]}


def gathered(texts: Iterable[str], *, max_characters: int) -> list[str]:
    """``texts`` cleaned, each once, blank ones left out, as many as fit; the first in any case.

    A text is never cut, so that what is copied from it may go on to its end.
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
    """``text`` with what no tokenizer takes or no model writes replaced, one character by one.

    That is halves of surrogate pairs and control characters, as binary rubbish in a document has them.
    """
    return _RUBBISH.sub("\ufffd", text)
