"""The command behind ``make rag``: indexes a folder and answers questions from it, with citations.

One question, or a session: questions in, streamed answers with numbered footnotes out. Knows arguments
and the terminal; the other modules do the work.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, suppress
from io import TextIOWrapper
from itertools import islice
from typing import Any, cast

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, BaseMessageChunk, HumanMessage
from langchain_core.messages.utils import message_chunk_to_message
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from platformdirs import user_cache_path
from rich.console import Console
from rich.live import Live
from rich.text import Text

import local_backend
from retrieval_copy.chain import RetrievalCopyChain
from retrieval_copy.display import CitedAnswer, CitedPassage, find_citations
from retrieval_copy.prompting import in_context
from retrieval_copy.stores.files import PARSERS, from_home
from retrieval_copy.stores.folder_index import FORMAT, FolderIndex, IndexReport
from retrieval_copy.stores.stores import BM25Retriever, HybridRetriever, SentenceEmbeddings, qdrant_store
from retrieval_copy.with_citations import RetrievalListener

_WIDTH = 100  # of text for a pipe
_MOST_SKIPPED = 10  # named one by one
_INTERRUPTED = 130  # as shells report it

HELP = "a question, or a footnote's number to see its passage; q leaves, Ctrl-C stops an answer"
_PROMPT = "> "
_MAX_TURNS = 3  # earlier turns that the model sees
_MOST_NEAREST = 3  # passages that are shown where none surely answers


def parser() -> argparse.ArgumentParser:
    """The argument parser of the command."""
    description = "Answers questions from a folder of documents, with citations."
    arguments = argparse.ArgumentParser(prog="python -m retrieval_copy", description=description)
    add = arguments.add_argument
    add("docs", type=from_home, metavar="FOLDER", help="folder to answer from")
    add("question", nargs="?", metavar="QUESTION", help="answered once; without it a session begins")
    add("--store", choices=("qdrant", "bm25"), default="qdrant", help="search words and meaning, or words")
    add("--url", help="URL of a Qdrant server; by default Qdrant runs locally, on disk")
    add("--index", type=from_home, help="folder to keep the index in; by default in your cache folder")
    add("--model", type=lambda name: str(from_home(name)), help="a folder, GGUF file or hub name")
    add("--k", type=int, default=4, help="passages to retrieve")
    add("--max-tokens", type=int, help="maximum tokens of an answer (256)")
    add("--min-citation-tokens", type=int, default=3, help="minimum words in a citation")
    add("--json", action="store_true", help="print the answer, its support and citations as JSON alone")
    return arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not every terminal has every character, or speaks Unicode
            stream.reconfigure(errors="replace")
    options = parser().parse_args(arguments)
    if options.json and not options.question:
        parser().error("--json answers one QUESTION: name it behind the folder")
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of flaws that do not matter
    console = Console(stderr=options.json, highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    try:
        if not options.docs.is_dir():
            raise NotADirectoryError(f"{options.docs} is not a folder")
        _ = options.model and local_backend.find_model(options.model)
        gc.disable()  # imports leave no garbage: looking for it takes seconds, then and as the process ends
        _ = local_backend.ChatLocal  # comes with torch and transformers
        gc.freeze()
        gc.enable()
        with ExitStack() as opened:
            retriever, report = _indexed(options, console, opened)
            _show(report, console)
            if not report.num_passages:
                raise ValueError(f"{options.docs} has no file that can be read, of {', '.join(PARSERS)}")
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
    name = hashlib.sha256(str(options.docs.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    kept = (options.index or user_cache_path("langchain-parallel-decoding") / "rag") / name
    if options.store == "bm25":
        index = FolderIndex(options.docs, state=kept / "bm25.json")
        report = index.update(console=console)
        return BM25Retriever(documents=index.documents, k=options.k), report
    where: dict[str, Any] = {"url": options.url} if options.url else {"path": kept / "qdrant"}
    store = qdrant_store(SentenceEmbeddings(), collection=f"folder-{kept.name}-{FORMAT}", **where)
    opened.callback(store.client.close)
    name = hashlib.sha256(str(options.url).encode()).hexdigest()[:8] if options.url else "qdrant"
    index = FolderIndex(options.docs, state=kept / f"{name}.json", store=store)
    report = index.update(console=console)
    return HybridRetriever(documents=index.documents, store=store, k=options.k), report


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

    logging.disable_progress_bar()
    with console.status("Loading the model"):
        chat = local_backend.ChatLocal.from_pretrained(options.model, drafter="reference_copy")
    with chat:
        chain = RetrievalCopyChain(retriever, chat, min_citation_tokens=options.min_citation_tokens)
        bound = {} if options.max_tokens is None else {"max_tokens": options.max_tokens}
        session = Session(chain, console, bound)
        if options.json:
            message = chain.invoke(options.question, **bound)
            print(json.dumps({"answer": message.text, **message.response_metadata}))
        elif options.question is not None:
            session.ask(options.question)
        else:
            console.print(f"Type {HELP}", style="dim", markup=False)
            session.run(line_reader(console))


class Session:
    """Answers questions one after the other with a :class:`~retrieval_copy.RetrievalCopyChain`.

    Each may refer to the ones before. ``arguments`` are those of every call of the chain.
    """

    def __init__(
        self, chain: Runnable[Any, AIMessage], console: Console, arguments: dict[str, Any] | None = None
    ) -> None:
        self._chain, self._console = chain, console
        self._arguments = arguments or {}
        self._turns: list[BaseMessage] = []
        self._answer: AIMessage | None = None
        self._context: list[Document] = []

    def run(self, read: Callable[[], str]) -> None:
        """Answers lines until the user leaves or ``read`` raises ``EOFError``."""
        while True:
            try:
                line = read().strip()
            except EOFError:
                if self._console.is_terminal:
                    self._console.print()  # Ctrl-D leaves the cursor behind the prompt
                return
            except KeyboardInterrupt:
                self._console.print("(q leaves)", style="dim")
                continue
            if line.lower() in {"q", "quit", "exit"}:
                return
            self.take(line)

    def take(self, line: str) -> None:
        """Acts on one line: a question, the number of a footnote, or ``?``."""
        if line.strip("[]").isdecimal():
            self._show_passage(int(line.strip("[]")))
        elif line in ("?", "help"):
            self._console.print(HELP, style="dim", markup=False)
        elif line:
            try:
                self.ask(line)
            except (RuntimeError, ValueError) as error:  # the next question may fare better
                self._console.print(f"{type(error).__name__}: {error}", style="red", markup=False)

    def ask(self, question: str) -> None:
        """Answers ``question``; Ctrl-C ends the answer and leaves it out of the conversation."""
        listener, whole = RetrievalListener(), cast("BaseMessageChunk", AIMessageChunk(content=""))
        asked = [*self._turns[-2 * _MAX_TURNS :], HumanMessage(question)]
        parts = self._chain.stream(asked, listener.listening(None), **self._arguments)
        # While it is written the text is replaced again and again, where there is a terminal that can do so.
        live = Live(Text("…", "dim"), console=self._console, transient=True)
        try:
            with closing(cast("Generator[AIMessageChunk, None, None]", parts)), live:
                for part in parts:
                    whole += part
                    live.update(Text(str(whole.text)))
        except KeyboardInterrupt:
            live.stop()  # it still runs if it was interrupted in its beginning
            self._answer = None
            text = str(whole.text)
            self._console.print(Text.assemble(text, ("\n(stopped)" if text else "(stopped)", "dim")))
            return
        self._answer = answer = cast("AIMessage", message_chunk_to_message(whole))
        self._context = listener.of_chain
        if answer.response_metadata["retrieval"].get("supported") is False:
            self._console.print("nothing here answers this for sure; the nearest passages:", style="yellow")
            for passage in self._context[:_MOST_NEAREST]:
                source = (f"{passage.metadata.get('source', '')}\n", "bold")
                self._console.print(Text.assemble(source, in_context(passage), "\n"))
        else:
            self._console.print(CitedAnswer(answer))
        if decoding := answer.response_metadata.get("decoding"):
            forwards, tokens = decoding["num_forwards"], decoding["tokens_per_forward"]
            self._console.print(f"{forwards} forwards, {tokens:.1f} tokens each", style="dim")
        self._turns += [HumanMessage(question), AIMessage(str(answer.text))]

    def _show_passage(self, number: int) -> None:
        citations = find_citations(self._answer) if self._answer else []
        if not 1 <= number <= len(citations):
            said = f"the last answer has {len(citations)}" if citations else "the last answer has none"
            self._console.print(f"no footnote [{number}]: {said}", style="dim", markup=False)
            return
        citation = citations[number - 1]
        self._console.print(CitedPassage(self._context[citation["document"]], citation))


def line_reader(console: Console) -> Callable[[], str]:
    """Reads lines from the standard input: with a prompt and a history from a person, plainly from a pipe."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # on Windows
            import readline  # noqa: F401 - gives input() a history and editing
        return lambda: input(_PROMPT)

    def read() -> str:
        line = input()
        console.print(f"{_PROMPT}{line.strip()}", markup=False)
        return line

    return read
