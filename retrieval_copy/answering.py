"""Produces one answer: condense, retrieve, gather references, ask, cite, check.

The algorithm is written once for synchronous and asynchronous calls: :meth:`Method.prepare` and
:meth:`Method.finish` are generators that yield their next step
(:class:`~retrieval_copy.references.Search` or :class:`Ask`) and receive the outcome or the error. The caller
performs each step by blocking or by awaiting. Knows prompts, documents and references; does not know the
methods of a Runnable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable

from retrieval_copy.citations.citations import cite
from retrieval_copy.citations.quoting import quoting_grammar
from retrieval_copy.citations.support import NOT_HELD, is_supported
from retrieval_copy.conversation import Conversation, standalone, summed, text_of, usage_of
from retrieval_copy.model_adapter import Way, arguments
from retrieval_copy.prompting import QUOTE_REQUEST, excerpts
from retrieval_copy.references import (
    EarlierTurns,
    ReferenceSource,
    RemembersAnswers,
    RetrievalError,
    Search,
    Situation,
    cleaned,
    gathered,
    retrieved,
)
from sot_chains.providers.loops import LoopGuard

_log = logging.getLogger(__name__)

# Tokens reserved for the answer, for the wording of the request, and for the markup around each document and
# message; and the document budget if the model does not report its context length.
_ANSWER_TOKENS, _REQUEST_TOKENS, _LAYOUT_TOKENS, _DOCUMENT_TOKENS = 1024, 64, 8, 12_000
_QUESTION_TOKENS = 256

PROVIDER = "retrieval_copy"
"""Marks messages from this package; see :mod:`retrieval_copy.with_citations`."""


OnUnsupported = Literal["mark", "retry", "refuse"]


class Ask(NamedTuple):
    """A model call whose reply the next step needs; ``name`` is that of its run."""

    messages: list[BaseMessage]
    arguments: dict[str, Any]
    name: str


Steps = Generator["Search | Ask", Any, "Request"]


@dataclass(frozen=True)
class Request:
    """The final request to the model, and what is needed to turn its reply into a message.

    Attributes:
        messages: The prompt.
        arguments: Further arguments of the model call: the references.
        question: The standalone question.
        documents: The retrieved documents, in order.
        passages: Their parts that the prompt shows; ``None`` if none were asked for.
        trace: ``response_metadata["retrieval"]``.
        usage: Token usage of the calls so far.
    """

    messages: list[BaseMessage]
    arguments: dict[str, Any]
    question: str
    documents: list[Document]
    passages: list[str] | None
    trace: dict[str, Any]
    usage: UsageMetadata | None

    def guard(self) -> LoopGuard | None:
        """A new guard for the text of the reply, if it answers from passages."""
        return LoopGuard() if self.passages else None


@dataclass(frozen=True)
class Method:
    """The settings of a chain, which are the same for every question.

    Those that are not described here are arguments of :class:`~retrieval_copy.RetrievalCopyChain`.

    Attributes:
        sources: The reference sources.
        way: How references are passed to the model.
        limits: Arguments of the call that bound an answer from passages.
        quotes: Whether answers from passages are quotations alone.
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
    limits: dict[str, Any]
    quotes: bool
    count: Callable[[str], int]
    max_document_tokens: int | None
    max_input_tokens: int | None
    max_reference_characters: int
    min_citation_tokens: int
    on_unsupported: OnUnsupported

    def __post_init__(self) -> None:
        if self.retriever is not None and not isinstance(self.retriever, Runnable):
            raise TypeError(
                "a retriever is a LangChain retriever or another Runnable, "
                f"got {type(self.retriever).__name__}; for a vector store pass store.as_retriever()"
            )
        if strangers := [source for source in self.sources if not isinstance(source, ReferenceSource)]:
            raise TypeError(
                "references are sources such as RetrievedDocuments() or SimilarAnswers(store), "
                f"got {strangers!r:.80}"
            )
        for name in ("min_citation_tokens", "max_document_tokens", "max_reference_characters"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.on_unsupported not in get_args(OnUnsupported):
            raise ValueError(
                f"on_unsupported must be one of {get_args(OnUnsupported)}, got {self.on_unsupported!r}"
            )

    @property
    def holds_answers(self) -> bool:
        """Whether an answer is shown only when it is whole, since it may be replaced."""
        return self.on_unsupported != "mark"

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
            question, usage = standalone(text_of(reply), question), usage_of(reply)
        # 2. Retrieve documents.
        query = " ".join(filter(None, (question, cleaned(conversation.begun_reply))))
        query = self.query(query).strip() or query
        documents: list[Document] = []
        if retriever is not None:
            documents = yield from retrieved(retriever, query)
        # 3. Gather references.
        situation = Situation(
            question, conversation.history, documents, leaves_machine=self.way in ("prediction", "extra_body")
        )
        texts = yield from self._gathered(situation)
        # 4. Build the request.
        messages, passages = self._messages(conversation, question, documents)
        trace = {
            "question": question,
            "query": query if retriever is not None else None,
            "num_documents": len(documents),
            "num_documents_in_prompt": len(passages),
            "num_references": len(texts),
            "copied_as": self.way if texts else None,
        }
        return Request(
            messages,
            {**self._limits(passages, question, conversation), **arguments(self.way, texts)},
            question,
            documents,
            passages if retriever is not None else None,
            trace,
            usage,
        )

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
        bound = {"max_tokens": _QUESTION_TOKENS} if given else {}
        return Ask(request.to_messages(), {**given, **bound}, "condense")

    def _gathered(self, situation: Situation) -> Generator[Search, Any, list[str]]:
        if self.way is None:
            return []
        texts: list[str] = []
        for source in self.sources:
            found: list[Document] = []
            if search := source.search(situation.question):
                try:
                    found = yield from retrieved(*search)
                except RetrievalError as error:  # the answer is the same without them, only slower
                    _log.warning("no references from %s: %s", type(source).__name__, error)
            texts.extend(source.texts(situation, found))
        return gathered(texts, max_characters=self.max_reference_characters)

    def _messages(
        self, conversation: Conversation, question: str, documents: Sequence[Document]
    ) -> tuple[list[BaseMessage], list[str]]:
        """Returns the prompt and the passages in it."""
        shown = excerpts(
            [cleaned(document.page_content) for document in documents],
            question,
            max_tokens=self._document_tokens(conversation),
            count=lambda text: self.count(text) + _LAYOUT_TOKENS,
        )
        if not shown:  # no documents: send the conversation unchanged
            return list(conversation.messages), []
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
        return messages, [excerpt.text for excerpt in shown]

    def _limits(self, passages: Sequence[str], question: str, conversation: Conversation) -> dict[str, Any]:
        """Arguments of the model call that bound the answer."""
        if not passages:
            return {}
        if not self.quotes or conversation.after:  # a grammar cannot bound a reply that is begun
            return self.limits
        grammar = quoting_grammar(passages, question)
        return {**self.limits, **({"grammar": grammar} if grammar else {})}

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

    def finish(
        self, request: Request, reply: object, arguments: dict[str, Any]
    ) -> Generator[Ask, Any, AIMessage]:
        """Turns a reply into the final message, and acts on one that the passages do not support.

        Args:
            request: The request the model received.
            reply: The model's reply: a message or text.
            arguments: Those of the model call, for another one.
        """
        message = self._message(request, reply)
        is_to_act = message.response_metadata["retrieval"]["supported"] is False and self.holds_answers
        if not is_to_act or (self.on_unsupported == "retry" and not request.passages):
            return message
        if self.on_unsupported == "refuse":
            return self._message(request, reply, refused=True)
        turns = [*request.messages]
        begun = turns.pop() if isinstance(turns[-1], AIMessage) else AIMessage("")
        said = AIMessage(str(begun.text) + str(message.text))
        again = yield Ask([*turns, said, HumanMessage(QUOTE_REQUEST)], arguments, "retry")
        usage = summed(request.usage, usage_of(reply))
        return self._message(replace(request, usage=usage), again, retried=True)

    def _message(
        self, request: Request, reply: object, *, refused: bool = False, retried: bool = False
    ) -> AIMessage:
        """The final message, with citations."""
        text, guard = text_of(reply), request.guard()
        if guard is not None:
            text = guard.feed(text) + ("" if guard.is_over else guard.end())
        if refused:
            text = NOT_HELD
        citations = cite(text, request.documents, min_tokens=self.min_citation_tokens)
        supported = None
        if request.passages is not None:
            supported = not refused and is_supported(text, request.question, request.passages, citations)
        trace = {
            **request.trace,
            "supported": supported,
            "acted": "retried" if retried else "refused" if refused else None,
            "stopped_by": "loop" if guard is not None and guard.is_over else None,
        }
        return AIMessage(
            content=text,
            id=reply.id if isinstance(reply, AIMessage) else None,
            usage_metadata=summed(request.usage, usage_of(reply)),
            response_metadata={
                **(reply.response_metadata if isinstance(reply, AIMessage) else {}),
                "model_provider": PROVIDER,
                "citations": citations,
                "retrieval": trace,
            },
        )

    def remembering(self) -> list[RemembersAnswers]:
        """The sources that store finished answers."""
        return [source for source in self.sources if isinstance(source, RemembersAnswers) and source.remember]


def _printable(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata as prompt template fields."""
    return {
        str(name): cleaned(value) if isinstance(value, str) else value for name, value in metadata.items()
    }
