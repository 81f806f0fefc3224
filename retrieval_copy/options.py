"""The options of a chain, and the prompt that follows from them for a question and its documents.

Knows prompts and documents. Does not call models or retrievers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import run_in_executor

from retrieval_copy.citations.questions import Question
from retrieval_copy.citations.quoting import quoting_grammar
from retrieval_copy.citations.sentences import placed_sentences
from retrieval_copy.conversation import Conversation
from retrieval_copy.model_adapter import Transport
from retrieval_copy.prompting import DOCUMENT_PROMPT, excerpts, in_context, nearest_sentences, path_of
from retrieval_copy.references import ReferenceSource, cleaned
from retrieval_copy.stores.stores import HybridRetriever

# Tokens reserved for the answer, for the wording of the request, and for the markup around each document and
# message; and the document budget if the model does not report its context length.
_ANSWER_TOKENS, _REQUEST_TOKENS, _LAYOUT_TOKENS, _DOCUMENT_TOKENS = 1024, 64, 8, 12_000

_READ_TOKENS = 48, 144  # of each passage, by a model that only quotes; where a sentence is longer

OnUnsupported = Literal["mark", "refuse"]


@dataclass(frozen=True)
class AnswerOptions:
    """The options of a chain; most are described by :class:`~retrieval_copy.RetrievalCopyChain`."""

    retriever: Runnable[str, list[Document]] | None
    prompt: BasePromptTemplate[Any]
    document_prompt: BasePromptTemplate[Any]
    query: Callable[[str], str]
    sources: tuple[ReferenceSource, ...]
    transport: Transport | None
    limits: dict[str, Any]  # arguments of the call that bound an answer from passages
    quotes: bool  # whether answers from passages are quotations alone
    count: Callable[[str], int]  # counts tokens
    max_document_tokens: int | None  # in a prompt; None: what max_input_tokens leaves
    max_input_tokens: int | None  # of prompt and answer together; None if unknown
    min_citation_tokens: int
    on_unsupported: OnUnsupported

    def __post_init__(self) -> None:
        if self.retriever is not None and not isinstance(self.retriever, Runnable):
            raise TypeError(
                "a retriever is a LangChain retriever or another Runnable, "
                f"got {type(self.retriever).__name__}; for a vector store pass store.as_retriever()"
            )
        for name in ("min_citation_tokens", "max_document_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.on_unsupported not in (known := get_args(OnUnsupported)):
            raise ValueError(f"on_unsupported must be one of {known}, got {self.on_unsupported!r}")

    def messages(
        self, conversation: Conversation, asked: Question, documents: Sequence[Document]
    ) -> tuple[list[BaseMessage], list[str]]:
        """The prompt, and the passages in it."""
        # A prompt for documents of the user's own says itself what it shows of their metadata.
        is_ours = self.document_prompt == DOCUMENT_PROMPT
        shown = excerpts(
            [cleaned(in_context(one) if is_ours else one.page_content) for one in documents],
            asked,
            max_tokens=self._document_tokens(conversation),
            count=lambda text: self.count(text) + _LAYOUT_TOKENS,
        )
        if not shown:  # no documents: send the conversation unchanged
            return list(conversation.messages), []
        laid_out = [
            self._laid_out(documents[index], self._read(text, asked), number)
            for number, (index, text) in enumerate(shown.items(), start=1)
        ]
        prompt = self.prompt.invoke(
            {
                "documents": "\n\n".join(laid_out),
                "question": asked.text,
                "asked": cleaned(conversation.question),
                "history": [] if self.quotes else list(conversation.history),
            }
        )
        return [*conversation.system, *prompt.to_messages(), *conversation.after], [*shown.values()]

    def _read(self, text: str, asked: Question) -> str:
        """What the model reads of a passage: if it only quotes, the nearest sentences and the headings."""
        sizes = [self.count(path_of(text)) + num_tokens for num_tokens in _READ_TOKENS]
        if not self.quotes or self.count(text) <= sizes[0]:
            return text
        read = (nearest_sentences(text, asked, size, self.count) for size in sizes)
        return next(filter(None, read), text)

    async def asked(self, question: str, documents: Sequence[Document]) -> Question:
        """What ``question`` asks for, and how near ``documents`` are to it if the retriever knows that."""
        if not isinstance(self.retriever, HybridRetriever):
            return Question(question)
        placed = [one for document in documents for one in placed_sentences(cleaned(in_context(document)))]
        shown = [text for one in placed for text in one.contexts]
        return Question(question, await run_in_executor(None, self.retriever.likeness, question, shown))

    def bounds(self, passages: Sequence[str], asked: Question, conversation: Conversation) -> dict[str, Any]:
        """Arguments of the model call that bound an answer from ``passages``."""
        if not passages:
            return {}
        if not self.quotes or conversation.after:  # a grammar cannot bound a reply that is begun
            return self.limits
        grammar = quoting_grammar(passages, asked)
        return {**self.limits, **({"grammar": grammar} if grammar else {})}

    def _laid_out(self, document: Document, text: str, number: int) -> str:
        printable = {
            str(name): cleaned(value) if isinstance(value, str) else value
            for name, value in document.metadata.items()
        }
        fields = {**printable, "page_content": text, "number": number}
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
