"""Whether the passage that answers a question is found, by words, by meaning and by both: recall at 1, 3, 5.

``folder``: invented files of a club in several formats and languages (``benchmarks/folder``), and questions
that name what their passage holds. ``packages``: the descriptions of installed packages; the question is the
heading of a section, which is taken out of the passage. ``papers``: the passages of the LLM Accelerator's
cases (arXiv 2304.04487) in one index; any of a question's own passages is right. A table, then a JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from rich.console import Console
from rich.table import Table

from benchmarks.rag_quality import DATA
from local_backend.offline.jsonl import read_lines
from retrieval_copy import BM25Retriever, FolderIndex, HybridRetriever, SentenceEmbeddings
from retrieval_copy.prompting import in_context

FOLDER = Path(__file__).parent / "folder"
_PACKAGES = ("anyio", "httpx", "openai", "pydantic", "pypdf", "qdrant-client", "rich", "transformers")
_DEPTHS = (1, 3, 5)


class Corpus(NamedTuple):
    """Passages, and questions with what tells the right ones."""

    passages: list[Document]
    questions: list[tuple[str, Callable[[Document], bool]]]


def folder() -> Corpus:
    index = FolderIndex(FOLDER)
    index.update()
    questions = [line.record() for line in read_lines(FOLDER / "questions.jsonl")]
    return Corpus(
        index.documents,
        [(one["question"], _holds(one["file"], one["answers"])) for one in questions if one["file"]],
    )


def _holds(source: str, answers: Sequence[str]) -> Callable[[Document], bool]:
    def is_right(passage: Document) -> bool:
        text = " ".join(passage.page_content.split())
        return passage.metadata["source"] == source and any(answer in text for answer in answers)

    return is_right


def packages() -> Corpus:
    with TemporaryDirectory() as written:
        for package in _PACKAGES:
            Path(written, f"{package}.md").write_text(str(metadata(package).json["description"]), "utf-8")
        index = FolderIndex(written)
        index.update()
    passages, questions = [], []
    for passage in index.documents:
        heading = str(passage.metadata.pop("heading", "")).rpartition(" > ")[2]
        lines = passage.page_content.split("\n", 1)
        if lines[0].startswith("#") and len(lines) == 2 and len(heading.split()) > 1:
            questions.append((f"{passage.metadata['title']}: {heading}", _is(str(passage.id))))
            passages.append(Document(lines[1], id=passage.id, metadata=passage.metadata))
        else:
            passages.append(passage)
    return Corpus(passages, questions)


def _is(*ids: str) -> Callable[[Document], bool]:
    return lambda passage: passage.id in ids


def papers() -> Corpus:
    passages, questions = [], []
    for case, line in enumerate(read_lines(DATA)):
        record = line.record()
        own = [Document(text, id=f"{case}-{number}") for number, text in enumerate(record["documents"])]
        passages += own
        questions.append((record["query"], _is(*(str(one.id) for one in own))))
    return Corpus(passages, questions)


CORPORA: dict[str, Callable[[], Corpus]] = {"folder": folder, "packages": packages, "papers": papers}


def ranked(corpus: Corpus) -> Iterator[tuple[str, Callable[[str], list[Document]]]]:
    """The ways to search ``corpus``."""
    most = max(_DEPTHS)
    yield "words", BM25Retriever(documents=corpus.passages, k=most).invoke
    store = InMemoryVectorStore(SentenceEmbeddings())
    shown = [Document(in_context(one), id=one.id) for one in corpus.passages]
    store.add_documents(shown)
    known = {one.id: one for one in corpus.passages}
    yield "meaning", lambda question: [known[one.id] for one in store.similarity_search(question, most)]
    yield "both", HybridRetriever(documents=corpus.passages, store=store, k=most).invoke


def measure(corpus: Corpus) -> dict[str, dict[str, float]]:
    """Recall by way and depth."""
    recall = {}
    for way, search in ranked(corpus):
        found = [[is_right(one) for one in search(question)] for question, is_right in corpus.questions]
        recall[way] = {
            str(depth): round(sum(any(right[:depth]) for right in found) / len(found), 3) for depth in _DEPTHS
        }
    return recall


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retrieval_recall", description=__doc__)
    parser.add_argument("--corpora", nargs="+", choices=CORPORA, default=list(CORPORA))
    options = parser.parse_args(arguments)
    table = Table("corpus", "passages", "questions", "search", *(f"recall at {depth}" for depth in _DEPTHS))
    figures = {}
    for name in options.corpora:
        corpus = CORPORA[name]()
        figures[name] = measure(corpus)
        for way, recall in figures[name].items():
            counts = (str(len(corpus.passages)), str(len(corpus.questions)))
            table.add_row(name, *counts, way, *(f"{value:.3f}" for value in recall.values()))
    Console(width=100).print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
