"""Retrieval whose texts are also what the model copies from, and answers with citations that are facts.

chain = RetrievalCopyChain(retriever, model)  # any LangChain retriever and chat model
message = chain.invoke("When may the kiln be opened?")
message.response_metadata["citations"]  # spans that stand word for word in the documents, with offsets

The names of the stores need the ``rag`` extra; they are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from retrieval_copy import content_blocks as _content_blocks
from retrieval_copy.answering import RetrievalError
from retrieval_copy.chain import RetrievalCopyChain
from retrieval_copy.prompts import ANSWER_PROMPT, CONDENSE_PROMPT, DOCUMENT_PROMPT
from retrieval_copy.provenance import Citation, citation_annotations, cite
from retrieval_copy.references import (
    EarlierTurns,
    RecentAnswers,
    ReferenceSource,
    RemembersAnswers,
    RetrievedDocuments,
    Search,
    SimilarAnswers,
    Situation,
)
from retrieval_copy.with_citations import WithCitations

if TYPE_CHECKING:
    from retrieval_copy.bm25 import BM25Retriever
    from retrieval_copy.embeddings import SentenceEmbeddings
    from retrieval_copy.folder_index import FolderIndex, IndexReport
    from retrieval_copy.qdrant import qdrant_store

__all__ = [
    "ANSWER_PROMPT",
    "CONDENSE_PROMPT",
    "DOCUMENT_PROMPT",
    "BM25Retriever",
    "Citation",
    "EarlierTurns",
    "FolderIndex",
    "IndexReport",
    "RecentAnswers",
    "ReferenceSource",
    "RemembersAnswers",
    "RetrievalCopyChain",
    "RetrievalError",
    "RetrievedDocuments",
    "Search",
    "SentenceEmbeddings",
    "SimilarAnswers",
    "Situation",
    "WithCitations",
    "citation_annotations",
    "cite",
    "qdrant_store",
]

_content_blocks.register()

_HOMES = {
    "BM25Retriever": "bm25",
    "FolderIndex": "folder_index",
    "IndexReport": "folder_index",
    "SentenceEmbeddings": "embeddings",
    "qdrant_store": "qdrant",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
