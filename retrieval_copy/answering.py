"""Produces one answer: complete the question, retrieve, gather references, ask, cite, check.

Knows prompts, documents and references; does not know the methods of a Runnable.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.utils import message_chunk_to_message
from langchain_core.runnables import Runnable, RunnableConfig

from retrieval_copy.citations.citations import CitationStream, cite
from retrieval_copy.citations.questions import Question
from retrieval_copy.citations.sentences import SENTENCE_END
from retrieval_copy.citations.support import REFUSAL, is_supported
from retrieval_copy.conversation import Conversation, StreamedReply, text_of
from retrieval_copy.model_adapter import RETRIEVE, arguments, joined
from retrieval_copy.options import AnswerOptions
from retrieval_copy.references import RetrievalError, SimilarAnswers, Situation, cleaned, gathered, retrieved
from sot_chains.providers.replies import LoopGuard

_log = logging.getLogger(__name__)

_MAX_REFERENCE_CHARACTERS = 4_000_000  # of all references; the first one is always taken

PROVIDER = "retrieval_copy"
"""Marks messages from this package; see :mod:`retrieval_copy.with_citations`."""

# LangGraph omits runs with this tag from its "messages" stream: their text is not the answer.
_TAG_NOSTREAM = "nostream"


@dataclass(frozen=True)
class Request:
    """The final request to the model, and what is needed to turn its reply into a message."""

    messages: list[BaseMessage]
    arguments: dict[str, Any]
    asked: Question
    documents: list[Document]
    passages: list[str] | None  # what the prompt shows; None if nothing was to be retrieved
    trace: dict[str, Any]

    def guard(self) -> LoopGuard | None:
        """A new guard for the text of the reply, if it answers from passages."""
        return LoopGuard() if self.passages else None


@dataclass(frozen=True)
class Answering:
    """Answers one question."""

    options: AnswerOptions  # of the chain
    model: Runnable[Any, Any]  # answers messages with a message
    config: RunnableConfig  # of the chain's run
    given: dict[str, Any]  # the user's keyword arguments of the call

    async def answer(self, model_input: LanguageModelInput) -> AIMessage:
        """The whole answer.

        Raises:
            RetrievalError: The retriever failed.
        """
        request = await self.prepare(model_input)
        reply = await self.model.ainvoke(request.messages, self._of_call, **request.arguments)
        return await self._finish(request, reply, self.options.on_unsupported == "refuse")

    async def stream(self, model_input: LanguageModelInput) -> AsyncGenerator[AIMessageChunk, None]:
        """The answer piece by piece, citations with the piece after them; the last chunk carries the rest.

        One that may be refused is held back until its first sentences are sure to be supported.

        Raises:
            RetrievalError: The retriever failed.
        """
        request = await self.prepare(model_input)
        holds, held, num_ends = self.options.on_unsupported == "refuse", "", 0
        holds = holds and request.passages is not None
        reply = StreamedReply(request.guard())
        citing = CitationStream(request.documents, min_tokens=self.options.min_citation_tokens)
        pieces = self.model.astream(request.messages, self._of_call, **request.arguments)
        async with aclosing(cast("AsyncGenerator[Any, None]", pieces)):
            async for piece in pieces:
                held += reply.add(piece)
                ends = [found.end() for found in SENTENCE_END.finditer(held[:-1])] if holds else []
                if len(ends) > num_ends:
                    num_ends, begun = len(ends), held[: ends[-1]]
                    found = cite(begun, request.documents, min_tokens=self.options.min_citation_tokens)
                    holds = not is_supported(begun, request.asked, request.passages or (), found, begun=True)
                if held and not holds:
                    cited = citing.feed(held)
                    metadata = {"model_provider": PROVIDER, "citations": cited} if cited else {}
                    yield AIMessageChunk(content=held, id=reply.whole.id, response_metadata=metadata)
                    held = ""
        rest = reply.end()
        message = await self._finish(request, message_chunk_to_message(reply.whole), holds)
        if text := str(message.text) if holds else rest:
            yield AIMessageChunk(content=text, id=message.id)
        metadata = message.response_metadata
        yield AIMessageChunk(
            content="",
            id=message.id,
            usage_metadata=message.usage_metadata,
            response_metadata={**metadata, "citations": metadata["citations"][citing.num_given :]},
            chunk_position="last",
        )

    async def prepare(self, model_input: LanguageModelInput) -> Request:
        """Turns the user's input into the request to the model.

        Raises:
            RetrievalError: The retriever failed.
        """
        options, conversation = self.options, Conversation.of(model_input)
        # 1. Put the questions before a follow-up that it refers to.
        retriever = options.retriever if self.given.get(RETRIEVE, True) else None
        question = cleaned(conversation.question if retriever is None else conversation.whole_question)
        # 2. Retrieve documents.
        query = " ".join(filter(None, (question, cleaned(conversation.begun_reply))))
        query = options.query(query).strip() or query
        documents: list[Document] = []
        if retriever is not None:
            documents = await retrieved(retriever, query, self.config)
        # 3. Gather references.
        texts = await self._references(Situation(question, conversation.history, documents, self.config))
        # 4. Build the request.
        asked = await options.asked(question, documents)
        messages, passages = options.messages(conversation, asked, documents)
        ours = {**options.bounds(passages, asked, conversation), **arguments(options.transport, texts)}
        trace = {
            "question": question,
            "query": query if retriever is not None else None,
            "num_documents": len(documents),
            "num_documents_in_prompt": len(passages),
            "num_references": len(texts),
            "copied_as": options.transport if texts else None,
        }
        shown = passages if retriever is not None else None
        return Request(messages, joined(ours, self.given), asked, documents, shown, trace)

    async def _references(self, situation: Situation) -> list[str]:
        if self.options.transport is None:
            return []
        texts: list[str] = []
        for source in self.options.sources:
            try:
                texts.extend(await source.atexts(situation))
            except RetrievalError as error:  # the answer is the same without them, only slower
                _log.warning("no references from %s: %s", type(source).__name__, error)
        return gathered(texts, max_characters=_MAX_REFERENCE_CHARACTERS)

    async def _finish(self, request: Request, reply: object, may_refuse: bool) -> AIMessage:
        """The final message; remembers the answer."""
        options, message = self.options, self._message(request, reply, may_refuse)
        for source in options.sources:
            if isinstance(source, SimilarAnswers) and source.remember:
                try:
                    await source.aadd(request.asked.text, str(message.text))
                except Exception:  # whatever a store raises: the user has the answer
                    _log.warning("the answer could not be kept for similar questions", exc_info=True)
        return message

    @property
    def _of_call(self) -> RunnableConfig:
        """The config of the model's call, which is not the answer for sure if that may be refused."""
        if self.options.on_unsupported == "mark":
            return self.config
        return {**self.config, "tags": [*(self.config.get("tags") or []), _TAG_NOSTREAM]}

    def _message(self, request: Request, reply: object, may_refuse: bool) -> AIMessage:
        """The final message, with citations; acts on a reply that the passages do not support."""
        text, guard = text_of(reply), request.guard()
        if guard is not None:
            text = guard.feed(text) + guard.end()
        citations = cite(text, request.documents, min_tokens=self.options.min_citation_tokens)
        supported = None
        if request.passages is not None:
            supported = is_supported(text, request.asked, request.passages, citations)
        if refused := supported is False and may_refuse:
            text, citations = REFUSAL, []
        trace = {
            **request.trace,
            "supported": supported,
            "acted": "refused" if refused else None,
            "stopped_by": "loop" if guard is not None and guard.is_over else None,
        }
        known = reply if isinstance(reply, AIMessage) else AIMessage("")
        return AIMessage(
            content=text,
            id=known.id,
            usage_metadata=known.usage_metadata,
            response_metadata={
                **known.response_metadata,
                "model_provider": PROVIDER,
                "citations": citations,
                "retrieval": trace,
            },
        )
