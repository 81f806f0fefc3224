"""The console command ``sot``: :mod:`sot_chains.cli` with local models and copying from the other packages.

The other packages are imported where they are used: ``sot --help`` is fast, and ``--model openai:NAME`` works
without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sot_chains.cli import run
from sot_chains.serving import Copying, Extras

if TYPE_CHECKING:
    from local_backend import ChatLocal

_NUM_PASSAGES = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; see :func:`sot_chains.cli.run`."""
    return run(arguments, Extras(load_local, make_copying))


def load_local(path: str | None, **options: Any) -> ChatLocal:
    """Loads a model that runs on this machine: a folder, a GGUF file, a name on the hub or the default model.

    Raises:
        ImportError: The extra ``local`` is not installed.
        OSError: There is no such model.
    """
    try:
        from local_backend import ChatLocal
    except ImportError as error:
        raise ImportError(f"{error}; a hosted model is named openai:NAME or anthropic:NAME") from error
    return ChatLocal.from_pretrained(path, **options)


def make_copying(model: Any, docs: Path | None) -> Copying:
    """References for models that run here, citations, and answers from the folder ``docs``.

    Raises:
        NotADirectoryError: ``docs`` is not a folder.
        ImportError: The extra ``rag`` is not installed, which ``docs`` needs.
    """
    from retrieval_copy import cite

    from_folder = None
    if docs is not None:
        if not docs.is_dir():
            raise NotADirectoryError(f"--docs: {docs} is not a folder")
        from langchain_core.vectorstores import InMemoryVectorStore

        from retrieval_copy import FolderIndex, HybridRetriever, RetrievalCopyChain, SentenceEmbeddings

        store = InMemoryVectorStore(SentenceEmbeddings())
        index = FolderIndex(docs, store=store)
        index.update()
        retriever = HybridRetriever(documents=index.documents, store=store, k=_NUM_PASSAGES)
        from_folder = partial(RetrievalCopyChain, retriever, on_unsupported="refuse")
    return Copying(cite, from_folder, _references_for(model))


def _references_for(model: Any) -> Any:
    """What makes references for ``model``; ``None`` if it does not run here."""
    if "local_backend" not in sys.modules:  # whose import takes seconds: its models have imported it
        return None
    from local_backend import ChatLocal, References

    return References if isinstance(model, ChatLocal) else None


if __name__ == "__main__":
    sys.exit(main())
