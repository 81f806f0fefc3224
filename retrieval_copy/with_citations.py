"""Citations for any Runnable that retrieves internally, such as a skeleton whose points retrieve separately.

Collects the documents through LangChain callbacks, so it need not know what it wraps.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.block_translators import register_translator
from langchain_core.messages.content import Annotation, ContentBlock, TextContentBlock
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, merge_configs

from retrieval_copy.answering import PROVIDER
from retrieval_copy.citations.citations import MIN_CITATION_TOKENS, citation_annotations, cite
from sot_chains.aio.blocking import BlockingRunnable

MessageT = TypeVar("MessageT", bound=AIMessage)


class WithCitations(BlockingRunnable[LanguageModelInput, AIMessage]):
    """Adds citations to the answers of a Runnable that retrieves internally.

    Retrievers may run in any order, so of several documents that contain a span the first by ``source``,
    ``id`` and text is cited. When streaming, the citations come with the last chunk.

    Args:
        runnable: Returns a message, e.g. ``SkeletonOfThought(RetrievalCopyChain(...))``.
        min_citation_tokens: Minimum number of words in a citation.

    Raises:
        ValueError: ``min_citation_tokens`` is below 1.
    """

    def __init__(
        self, runnable: Runnable[Any, AIMessage], *, min_citation_tokens: int = MIN_CITATION_TOKENS
    ) -> None:
        if min_citation_tokens < 1:
            raise ValueError(f"min_citation_tokens must be at least 1, got {min_citation_tokens}")
        self.runnable = runnable
        self.min_citation_tokens = min_citation_tokens

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answers ``input``."""
        retrieved = RetrievalListener()
        answer = await self.runnable.ainvoke(input, retrieved.listening(config), **kwargs)
        return self._cited(answer, retrieved)

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[AIMessageChunk, None]:
        """Streams the answer to ``input``, one chunk behind, so that the last one can carry citations."""
        retrieved, texts = RetrievalListener(), list[str]()
        last: AIMessageChunk | None = None
        chunks = self.runnable.astream(input, retrieved.listening(config), **kwargs)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk, None]", chunks)):
            async for chunk in chunks:
                if last is not None:
                    yield last
                metadata = {name: one for name, one in chunk.response_metadata.items() if name != "citations"}
                last = cast("AIMessageChunk", chunk).model_copy(update={"response_metadata": metadata})
                texts.append(str(last.text))
        if last is not None:
            yield self._cited(last, retrieved, text="".join(texts))

    def _cited(self, message: MessageT, retrieved: RetrievalListener, *, text: str | None = None) -> MessageT:
        whole = str(message.text) if text is None else text
        citations = cite(whole, retrieved.distinct, min_tokens=self.min_citation_tokens)
        metadata = {**message.response_metadata, "model_provider": PROVIDER, "citations": citations}
        return message.model_copy(update={"response_metadata": metadata})


class RetrievalListener(BaseCallbackHandler):
    """Notes what the retrievers under a run return."""

    run_inline = True

    def __init__(self) -> None:
        self._found: list[tuple[UUID | None, Sequence[Document]]] = []  # by the run that asked
        self._root: UUID | None = None

    def listening(self, config: RunnableConfig | None) -> RunnableConfig:
        """``config`` with this handler added to its callbacks."""
        return merge_configs(ensure_config(config), RunnableConfig(callbacks=[self]))

    def on_chain_start(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        """Notes the outermost chain."""
        self._root = self._root or run_id  # the first one to start contains the others

    def on_retriever_end(
        self, documents: Sequence[Document], *, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Notes documents."""
        self._found.append((parent_run_id, documents))

    def on_chain_end(self, outputs: Any, *, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        """Notes documents of a Runnable used as a retriever."""
        if isinstance(outputs, list) and all(isinstance(output, Document) for output in outputs):
            self._found.append((parent_run_id, outputs))

    @property
    def of_chain(self) -> list[Document]:
        """Those that the outermost chain asked for itself, in its order."""
        # Retrievers within the retriever have other parents; that of similar answers comes later.
        return list(next((found for parent, found in self._found if parent == self._root and found), ()))

    @property
    def distinct(self) -> list[Document]:
        """All, by source, id and text: those of runs at the same time come in any order."""
        documents: dict[tuple[str, str, str], Document] = {}
        for document in (document for _, found in self._found for document in found):
            key = (str(document.metadata.get("source", "")), document.id or "", document.page_content)
            documents.setdefault(key, document)
        return [documents[key] for key in sorted(documents)]


def content_blocks(message: AIMessage) -> list[ContentBlock]:
    """One text block with the citations as annotations; no block if ``message`` has neither."""
    citations = message.response_metadata.get("citations") or []
    text = str(message.text)
    if not text and not citations:
        return []
    block = TextContentBlock(type="text", text=text)
    if citations:
        block["annotations"] = list[Annotation](citation_annotations(citations))
    return [block]


register_translator(PROVIDER, content_blocks, content_blocks)  # for messages from this package
