"""Produces one answer: condense, retrieve, gather references, ask, cite.

The algorithm is written once for synchronous and asynchronous calls: :meth:`Method.prepare` is a generator
that yields its next step (:class:`~retrieval_copy.references.Search` or :class:`Ask`) and receives the
outcome or the error. The caller performs each step by blocking or by awaiting. Knows prompts, documents and
references; does not know the methods of a Runnable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable

from retrieval_copy.citations.citations import cite
from retrieval_copy.conversation import Conversation
from retrieval_copy.model_adapter import Way, arguments
from retrieval_copy.prompting import excerpts
from retrieval_copy.references import (
    EarlierTurns,
    ReferenceSource,
    RemembersAnswers,
    Search,
    Situation,
    cleaned,
    gathered,
)

_log = logging.getLogger(__name__)

# Tokens reserved for the answer, for the wording of the request, and for the markup around each document and
# message; and the document budget if the model does not report its context length.
_ANSWER_TOKENS, _REQUEST_TOKENS, _LAYOUT_TOKENS, _DOCUMENT_TOKENS = 1024, 64, 8, 12_000
_READABLE_CHARACTERS = 300
# A condensed question longer than twice the follow-up plus _QUESTION_CHARACTERS is rejected.
_QUESTION_TOKENS, _QUESTION_CHARACTERS = 256, 500

PROVIDER = "retrieval_copy"
"""Marks messages from this package; see :mod:`retrieval_copy.with_citations`."""


class RetrievalError(RuntimeError):
    """Documents could not be retrieved; the message names the retriever and what to check."""


class Ask(NamedTuple):
    """A model call whose reply the next step needs."""

    messages: list[BaseMessage]
    arguments: dict[str, Any]


Steps = Generator["Search | Ask", Any, "Request"]


@dataclass(frozen=True)
class Request:
    """The final request to the model, and what is needed to turn its reply into a message.

    Attributes:
        messages: The prompt.
        arguments: Further arguments of the model call: the references.
        question: The standalone question.
        documents: The retrieved documents, in order.
        trace: ``response_metadata["retrieval"]``.
        usage: Token usage of the calls so far.
    """

    messages: list[BaseMessage]
    arguments: dict[str, Any]
    question: str
    documents: list[Document]
    trace: dict[str, Any]
    usage: UsageMetadata | None


@dataclass(frozen=True)
class Method:
    """The settings of a chain, which are the same for every question.

    Those that are not described here are arguments of :class:`~retrieval_copy.RetrievalCopyChain`.

    Attributes:
        sources: The reference sources.
        way: How references are passed to the model.
        count: Counts tokens.
        max_document_tokens: Token budget of the documents in a prompt; ``None`` uses what is left of
            ``max_input_tokens``.
        max_input_tokens: Tokens of prompt and answer together; ``None`` if unknown.
    """

    retriever: Runnable[str, list[Document]] | None
    prompt: BasePromptTemplate[Any]
    document_prompt: BasePromptTemplate[Any]
    condense_prompt: BasePromptTemplate[Any] | None
    query: Callable[[str], str]
    sources: tuple[ReferenceSource, ...]
    way: Way | None
    count: Callable[[str], int]
    max_document_tokens: int | None
    max_input_tokens: int | None
    max_reference_characters: int
    min_citation_tokens: int

    def prepare(self, model_input: LanguageModelInput, *, retrieve: bool = True) -> Steps:
        """Turns the user's input into the request to the model.

        Raises:
            RetrievalError: The retriever failed.
        """
        conversation = Conversation.of(model_input)
        question, usage = cleaned(conversation.question), None
        # 1. Condense a follow-up into a standalone question.
        retriever = self.retriever if retrieve else None
        if conversation.history and self.condense_prompt is not None and retriever is not None:
            reply = yield self._condensing(conversation)
            question, usage = _standalone(text_of(reply), question), usage_of(reply)
        # 2. Retrieve documents.
        query = " ".join(filter(None, (question, cleaned(conversation.begun_reply))))
        query = self.query(query).strip() or query
        documents: list[Document] = []
        if retriever is not None:
            documents = yield from _retrieved(retriever, query)
        # 3. Gather references.
        situation = Situation(
            question, conversation.history, documents, leaves_machine=self.way == "prediction"
        )
        texts = yield from self._gathered(situation)
        # 4. Build the request.
        messages, num_shown = self._messages(conversation, question, documents)
        trace = {
            "question": question,
            "query": query if retriever is not None else None,
            "num_documents": len(documents),
            "num_documents_in_prompt": num_shown,
            "num_references": len(texts),
            "copied_as": self.way if texts else None,
        }
        return Request(messages, arguments(self.way, texts), question, documents, trace, usage)

    def _condensing(self, conversation: Conversation) -> Ask:
        assert self.condense_prompt is not None
        request = self.condense_prompt.invoke(
            {
                "conversation": conversation.transcript,
                "question": conversation.question,
                "history": list(conversation.history),
            }
        )
        turns = EarlierTurns().texts(Situation(conversation.question, conversation.history, ()), ())
        texts = gathered(turns, max_characters=self.max_reference_characters)
        # A prediction is billed and does not pay off for one short question.
        given = arguments(self.way, texts) if self.way == "references" else {}
        return Ask(request.to_messages(), {**given, "max_tokens": _QUESTION_TOKENS} if given else {})

    def _gathered(self, situation: Situation) -> Generator[Search, Any, list[str]]:
        if self.way is None:
            return []
        texts: list[str] = []
        for source in self.sources:
            found: list[Document] = []
            if search := source.search(situation.question):
                try:
                    found = yield from _retrieved(*search)
                except RetrievalError as error:  # the answer is the same without them, only slower
                    _log.warning("no references from %s: %s", type(source).__name__, error)
            texts.extend(source.texts(situation, found))
        return gathered(texts, max_characters=self.max_reference_characters)

    def _messages(
        self, conversation: Conversation, question: str, documents: Sequence[Document]
    ) -> tuple[list[BaseMessage], int]:
        """Returns the prompt and the number of documents in it."""
        shown = excerpts(
            [cleaned(document.page_content) for document in documents],
            question,
            max_tokens=self._document_tokens(conversation),
            count=lambda text: self.count(text) + _LAYOUT_TOKENS,
        )
        if not shown:  # no documents: send the conversation unchanged
            return list(conversation.messages), 0
        laid_out = [
            self._laid_out(documents[excerpt.document], excerpt.text, number)
            for number, excerpt in enumerate(shown, start=1)
        ]
        prompt = self.prompt.invoke(
            {
                "documents": "\n\n".join(laid_out),
                "question": question,
                "asked": cleaned(conversation.question),
                "history": list(conversation.history),
            }
        )
        messages = [*conversation.system, *prompt.to_messages(), *conversation.after]
        return messages, len(shown)

    def _laid_out(self, document: Document, text: str, number: int) -> str:
        fields = {**_printable(document.metadata), "page_content": text, "number": number}
        if missing := [name for name in self.document_prompt.input_variables if name not in fields]:
            raise ValueError(
                f"document_prompt wants {missing}, but a document has only {sorted(fields)}; "
                "use fields that all documents have in their metadata"
            )
        return str(self.document_prompt.format(**fields))

    def _document_tokens(self, conversation: Conversation) -> int:
        """The token budget of the documents in the prompt."""
        if self.max_document_tokens is not None:
            return self.max_document_tokens
        if self.max_input_tokens is None:
            return _DOCUMENT_TOKENS
        said = sum(self.count(str(message.text)) + _LAYOUT_TOKENS for message in conversation.messages)
        answer = min(_ANSWER_TOKENS, self.max_input_tokens // 4)
        return self.max_input_tokens - said - answer - _REQUEST_TOKENS

    def message(self, request: Request, reply: object) -> AIMessage:
        """Builds the final message with citations.

        Args:
            request: The request the model received.
            reply: The model's reply: a message or text.
        """
        text = text_of(reply)
        citations = cite(text, request.documents, min_tokens=self.min_citation_tokens)
        return AIMessage(
            content=text,
            id=reply.id if isinstance(reply, AIMessage) else None,
            usage_metadata=_sum(request.usage, usage_of(reply)),
            response_metadata={
                **(reply.response_metadata if isinstance(reply, AIMessage) else {}),
                "model_provider": PROVIDER,
                "citations": citations,
                "retrieval": request.trace,
            },
        )

    def remembering(self) -> list[RemembersAnswers]:
        """The sources that store finished answers."""
        return [source for source in self.sources if isinstance(source, RemembersAnswers) and source.remember]


def _standalone(written: str, question: str) -> str:
    """The condensed question, or ``question`` itself if the reply is empty or too long."""
    standalone = written.strip()
    is_question = 0 < len(standalone) <= 2 * len(question) + _QUESTION_CHARACTERS
    return standalone if is_question else question


def text_of(reply: object) -> str:
    """The text of a model's reply.

    Raises:
        TypeError: The reply is neither a message nor text.
    """
    if isinstance(reply, AIMessage):  # includes AIMessageChunk
        return str(reply.text)
    if isinstance(reply, str):
        return reply
    raise TypeError(
        f"the model must answer with an AIMessage or text, got {type(reply).__name__}: {reply!r:.80}; "
        "parsers belong after RetrievalCopyChain"
    )


def usage_of(reply: object) -> UsageMetadata | None:
    """Token usage of a model's reply, if reported."""
    return reply.usage_metadata if isinstance(reply, AIMessage) else None


def _sum(one: UsageMetadata | None, other: UsageMetadata | None) -> UsageMetadata | None:
    return add_usage(one, other) if one and other else one or other


def _retrieved(
    retriever: Runnable[str, list[Document]], query: str
) -> Generator[Search, Any, list[Document]]:
    name = retriever.get_name()
    try:
        found = yield Search(retriever, query)
    except Exception as error:  # stores raise many types; report them as one
        said = " ".join(str(error).split())[:_READABLE_CHARACTERS]
        raise RetrievalError(
            f"{name} could not be asked for documents ({type(error).__name__}: {said}); "
            "check that its store is running and reachable and has the collection"
        ) from error
    if not isinstance(found, list) or not all(isinstance(document, Document) for document in found):
        raise RetrievalError(f"{name} must return a list of LangChain documents, got {found!r:.80}")
    return found


def _printable(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata as prompt template fields."""
    return {
        str(name): cleaned(value) if isinstance(value, str) else value for name, value in metadata.items()
    }
