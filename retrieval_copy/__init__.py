"""Answers from retrieved documents, which the model also copies from, with citations.

chain = RetrievalCopyChain(retriever, model)  # any LangChain retriever and chat model
message = chain.invoke("When may the kiln be opened?")
message.response_metadata["citations"]  # spans that stand in the documents, with offsets

The store classes need the ``rag`` extra when they are used.
"""

from __future__ import annotations

from retrieval_copy.chain import RetrievalCopyChain
from retrieval_copy.citations.citations import Citation, citation_annotations, cite
from retrieval_copy.prompting import ANSWER_PROMPT, DOCUMENT_PROMPT
from retrieval_copy.references import (
    EarlierTurns,
    ReferenceSource,
    RetrievalError,
    RetrievedDocuments,
    SimilarAnswers,
    Situation,
)
from retrieval_copy.stores.folder_index import FolderIndex, IndexReport
from retrieval_copy.stores.stores import BM25Retriever, HybridRetriever, SentenceEmbeddings, qdrant_store
from retrieval_copy.with_citations import WithCitations

__all__ = [
    "ANSWER_PROMPT",
    "DOCUMENT_PROMPT",
    "BM25Retriever",
    "Citation",
    "EarlierTurns",
    "FolderIndex",
    "HybridRetriever",
    "IndexReport",
    "ReferenceSource",
    "RetrievalCopyChain",
    "RetrievalError",
    "RetrievedDocuments",
    "SentenceEmbeddings",
    "SimilarAnswers",
    "Situation",
    "WithCitations",
    "citation_annotations",
    "cite",
    "qdrant_store",
]
__version__ = "0.2.0"
