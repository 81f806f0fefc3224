"""A Qdrant collection as a LangChain vector store: in a folder on disk, or on a server.

Needs the ``rag`` extra.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.embeddings import Embeddings

if TYPE_CHECKING:
    from langchain_qdrant import QdrantVectorStore

_API_KEY = "QDRANT_API_KEY"


def qdrant_store(
    embeddings: Embeddings,
    *,
    path: str | Path | None = None,
    url: str | None = None,
    collection: str = "documents",
    **client_options: Any,
) -> QdrantVectorStore:
    """Opens a collection, and makes it if it is not there.

    Args:
        embeddings: Embed documents and queries.
        path: Folder of the local mode, which needs no server and serves one process at a time.
        url: Address of a server. Its key comes from the environment variable ``QDRANT_API_KEY``.
        collection: Name of the collection.
        client_options: Further arguments of ``QdrantClient``.

    Raises:
        ValueError: Neither ``path`` nor ``url`` is given, or both; or the collection holds vectors of another
            length.
        ConnectionError: There is no server at ``url``, or it refuses.
        RuntimeError: Another process has opened the folder.
        ImportError: The ``rag`` extra is not installed.
    """
    if (path is None) == (url is None):
        raise ValueError(f"give either path= (a folder) or url= (a server), got path={path!r}, url={url!r}")
    try:
        from langchain_qdrant import QdrantVectorStore
        from qdrant_client import QdrantClient
        from qdrant_client.http.exceptions import ApiException
        from qdrant_client.models import Distance, VectorParams
    except ImportError as error:
        raise ImportError(
            "Qdrant needs its client: pip install 'langchain-parallel-decoding[rag]'"
        ) from error
    where = {"path": str(path)} if path is not None else {"url": url, "api_key": os.environ.get(_API_KEY)}
    # The check of versions warns where there is no server; what follows says so better.
    client = QdrantClient(**{"check_compatibility": False, **where, **client_options})
    try:
        if not client.collection_exists(collection):
            size = len(embeddings.embed_query("size"))
            client.create_collection(collection, VectorParams(size=size, distance=Distance.COSINE))
    except ApiException as error:
        client.close()
        raise ConnectionError(
            f"the Qdrant server at {url} does not answer or refuses ({type(error).__name__}); check that "
            f"it runs, that url= is its address, such as http://127.0.0.1:6333, and that {_API_KEY} holds "
            "its key"
        ) from error
    return QdrantVectorStore(client=client, collection_name=collection, embedding=embeddings)
