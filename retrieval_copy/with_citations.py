"""Citations for any Runnable that retrieves internally, such as a skeleton whose points retrieve separately.

Collects the documents through LangChain callbacks, so it need not know what it wraps.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar, cast

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.block_translators import PROVIDER_TRANSLATORS, register_translator
from langchain_core.messages.content import Annotation, ContentBlock, TextContentBlock
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, merge_configs

from retrieval_copy.answering import PROVIDER
from retrieval_copy.citations.citations import MIN_CITATION_TOKENS, citation_annotations, cite
from sot_chains.aio.blocking import BlockingRunnable

if TYPE_CHECKING:
    from collections.abc import Sequence


MessageT = TypeVar("MessageT", bound=AIMessage)


class WithCitations(BlockingRunnable[LanguageModelInput, AIMessage]):
    """Adds citations to the answers of a Runnable that retrieves internally.

    Compares the whole answer with the documents of all retrievers under the Runnable. They may run in any
    order, so of several documents that contain a span the first by ``source``, ``id`` and text is cited. When
    streaming, the citations come with the last chunk.

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
        retrieved = _Retrieved()
        answer = await self.runnable.ainvoke(input, retrieved.listening(config), **kwargs)
        return self._cited(answer, retrieved)

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[AIMessageChunk, None]:
        """Streams the answer to ``input``, one chunk behind, so that the last one can carry citations."""
        retrieved, texts = _Retrieved(), list[str]()
        last: AIMessageChunk | None = None
        chunks = self.runnable.astream(input, retrieved.listening(config), **kwargs)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk, None]", chunks)):
            async for chunk in chunks:
                if last is not None:
                    yield last
                last = cast("AIMessageChunk", chunk)
                texts.append(str(last.text))
        if last is not None:
            yield self._cited(last, retrieved, text="".join(texts))

    def _cited(self, message: MessageT, retrieved: _Retrieved, *, text: str | None = None) -> MessageT:
        whole = str(message.text) if text is None else text
        citations = cite(whole, retrieved.documents, min_tokens=self.min_citation_tokens)
        metadata = {**message.response_metadata, "model_provider": PROVIDER, "citations": citations}
        return message.model_copy(update={"response_metadata": metadata})


class _Retrieved(BaseCallbackHandler):
    """Collects the distinct documents retrieved under a run."""

    run_inline = True

    def __init__(self) -> None:
        self._documents: dict[tuple[str, str, str], Document] = {}
        self._lock = threading.Lock()

    @property
    def documents(self) -> list[Document]:
        with self._lock:
            return [document for _, document in sorted(self._documents.items(), key=lambda pair: pair[0])]

    def listening(self, config: RunnableConfig | None) -> RunnableConfig:
        """``config`` with this handler added to its callbacks."""
        return merge_configs(ensure_config(config), RunnableConfig(callbacks=[self]))

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        self._add(documents)

    def on_chain_end(self, outputs: Any, **kwargs: Any) -> None:
        if isinstance(outputs, list):  # from a Runnable used as a retriever
            self._add([output for output in outputs if isinstance(output, Document)])

    def _add(self, documents: Sequence[Document]) -> None:
        with self._lock:
            for document in documents:
                key = (str(document.metadata.get("source", "")), document.id or "", document.page_content)
                self._documents.setdefault(key, document)


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


def register() -> None:
    """Makes LangChain use :func:`content_blocks` for messages from this package.

    Also for the sums of a model's own chunks and a last one with citations, as LangGraph streams them:
    LangChain joins the names of both providers.
    """
    for model_provider in ("", *PROVIDER_TRANSLATORS):
        register_translator(f"{model_provider}{PROVIDER}", content_blocks, content_blocks)
