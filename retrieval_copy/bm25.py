"""Retrieval by words: BM25 (Robertson and Zaragoza, 2009) over documents in memory. Needs the ``rag`` extra.

Knows documents. Does not know files; see :mod:`retrieval_copy.folder_index`.
"""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field, PrivateAttr

from retrieval_copy.words import is_word, pieces


class BM25Retriever(BaseRetriever):
    """Finds the documents that share the most, and the rarest, words with a query.

    A document that shares none is not returned, so there may be fewer than ``k``, or none.

    Attributes:
        documents: What is searched. Read once, when the retriever is made.
        k: How many documents to return at most; also an argument of ``invoke``.
    """

    documents: list[Document] = Field(repr=False)
    k: int = Field(default=4, ge=1)
    _index: Any = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Counts the words."""
        super().model_post_init(context)
        terms = [_terms(document.page_content) for document in self.documents]
        if any(terms):
            self._index = _bm25().BM25()
            self._index.index(terms, show_progress=False)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        wanted = self.k if k is None else k
        if wanted < 1:
            raise ValueError(f"k must be at least 1, got {wanted}")
        terms = [
            term for term in dict.fromkeys(_terms(query)) if self._index and term in self._index.vocab_dict
        ]
        if not terms:
            return []
        numbers, scores = self._index.retrieve(
            [terms],
            k=min(wanted, len(self.documents)),
            show_progress=False,
            backend_selection="numpy",
        )
        return [
            self.documents[number] for number, score in zip(numbers[0], scores[0], strict=True) if score > 0
        ]


def _terms(text: str) -> list[str]:
    return [piece.casefold() for piece in pieces(text) if is_word(piece)]


def _bm25() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ImportError(
            "BM25Retriever needs bm25s: pip install 'langchain-parallel-decoding[rag]'"
        ) from error
    return bm25s
