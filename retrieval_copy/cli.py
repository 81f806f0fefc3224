"""The command behind ``make rag``: indexes a folder and answers questions from it, with citations.

Knows arguments and the terminal; the other modules do the work.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_cache_path
from rich.console import Console

from retrieval_copy.chain import RetrievalCopyChain
from retrieval_copy.integrations import retrieval_chain
from retrieval_copy.session import HELP, Session, lines_of
from retrieval_copy.stores.files import PARSERS

if TYPE_CHECKING:
    from langchain_core.retrievers import BaseRetriever

    from retrieval_copy.stores.folder_index import IndexReport

_PIPED_WIDTH = 100
_TINY_PARAMETERS = 400e6  # a smaller model answers an earlier question again
_MOST_SKIPPED = 10  # named one by one
_INTERRUPTED = 130  # as shells report it


def parser() -> argparse.ArgumentParser:
    """The argument parser of the command."""
    arguments = argparse.ArgumentParser(
        prog="python -m retrieval_copy",
        description="Answers questions from a folder of documents, with citations.",
    )
    arguments.add_argument(
        "docs", type=lambda name: Path(name).expanduser(), metavar="FOLDER", help="folder to answer from"
    )
    arguments.add_argument(
        "question", nargs="?", metavar="QUESTION", help="answered once; without it a session begins"
    )
    arguments.add_argument(
        "--store", choices=("qdrant", "bm25"), default="qdrant", help="how to find passages"
    )
    arguments.add_argument("--url", help="URL of a Qdrant server; by default Qdrant runs locally, on disk")
    arguments.add_argument(
        "--index", type=Path, help="folder to keep the index in; by default in your cache folder"
    )
    arguments.add_argument("--model", help="a folder, GGUF file or hub name (SmolLM2-135M-Instruct)")
    arguments.add_argument("--k", type=int, default=4, help="passages to retrieve")
    arguments.add_argument("--max-tokens", type=int, help="maximum tokens of an answer (256)")
    arguments.add_argument("--min-citation-tokens", type=int, default=8, help="minimum words in a citation")
    return arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parser().parse_args(arguments)
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of flaws that do not matter
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH, highlight=False)
    try:
        with ExitStack() as opened:
            retriever, report = _indexed(options, console, opened)
            _show(report, console)
            if not report.num_passages:
                endings = ", ".join(PARSERS)
                raise ValueError(f"{options.docs} has no file that can be read, of {endings}")
            _answer(options, retriever, console)
    except KeyboardInterrupt:
        console.print("stopped; what is indexed is kept", style="dim")
        return _INTERRUPTED
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        said = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
        console.print(said, style="red", markup=False)
        return 1
    return 0


def _indexed(
    options: argparse.Namespace, console: Console, opened: ExitStack
) -> tuple[BaseRetriever, IndexReport]:
    from retrieval_copy.stores.folder_index import FORMAT, FolderIndex

    kept = (options.index or _cache_folder()) / hashlib.sha256(
        str(options.docs.resolve()).encode("utf-8", "surrogateescape")
    ).hexdigest()[:16]
    if options.store == "bm25":
        from retrieval_copy.stores.stores import BM25Retriever

        index = FolderIndex(options.docs, state=kept / "bm25.json")
        report = index.update(console=console)
        return BM25Retriever(documents=index.documents, k=options.k), report
    from retrieval_copy.stores.stores import SentenceEmbeddings, qdrant_store

    if not options.docs.is_dir():
        raise NotADirectoryError(f"{options.docs} is not a folder")
    where: dict[str, Any] = {"url": options.url} if options.url else {"path": kept / "qdrant"}
    store = qdrant_store(SentenceEmbeddings(), collection=f"folder-{kept.name}-{FORMAT}", **where)
    opened.callback(store.client.close)
    name = hashlib.sha256(str(options.url).encode()).hexdigest()[:8] if options.url else "qdrant"
    report = FolderIndex(options.docs, state=kept / f"{name}.json", store=store).update(console=console)
    return store.as_retriever(search_kwargs={"k": options.k}), report


def _show(report: IndexReport, console: Console) -> None:
    console.print(
        f"{report.num_passages} passages; files: {len(report.indexed)} indexed, {len(report.unchanged)} "
        f"unchanged, {len(report.removed)} removed, {len(report.skipped)} skipped",
        style="dim",
    )
    for source, reason in islice(report.skipped.items(), _MOST_SKIPPED):
        console.print(f"skipped {source}: {reason}", style="yellow", markup=False)
    if (num_others := len(report.skipped) - _MOST_SKIPPED) > 0:
        console.print(f"skipped {num_others} others", style="yellow")


def _answer(options: argparse.Namespace, retriever: BaseRetriever, console: Console) -> None:
    from transformers.utils import logging

    from local_backend import ChatLocal

    logging.disable_progress_bar()
    with console.status("Loading the model"):
        chat = ChatLocal.from_pretrained(options.model, drafter="reference_copy")
    with chat:
        chain = RetrievalCopyChain(retriever, chat, min_citation_tokens=options.min_citation_tokens)
        bound = {} if options.max_tokens is None else {"max_tokens": options.max_tokens}
        remembers = chat.num_parameters >= _TINY_PARAMETERS
        session = Session(retrieval_chain(chain), console, bound, remembers=remembers)
        if options.question is not None:
            session.ask(options.question)
        else:
            console.print(f"Type {HELP}", style="dim", markup=False)
            session.run(lines_of(console))


def _cache_folder() -> Path:
    return user_cache_path("langchain-parallel-decoding") / "rag"
