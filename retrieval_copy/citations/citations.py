"""Finds the spans of an answer that occur in the documents, and cites them.

Compares the texts only, so citations work for any model and any way of decoding. Knows texts and LangChain
documents; does not know models or retrievers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypedDict

from langchain_core.documents import Document
from langchain_core.messages.content import Citation as CitationAnnotation

from retrieval_copy.citations.suffix_automaton import SuffixAutomaton
from retrieval_copy.citations.words import Reading, is_word, readings

MIN_CITATION_TOKENS = 8
"""Default minimum number of words in a citation."""


class Passage(TypedDict):
    """A span of a document.

    ``document_text == document.page_content[document_start:document_end]``, in characters.

    Attributes:
        document: Index of the document in order of retrieval, from 0.
        document_id: The document's ``id``, if it has one.
        document_start: Start of the span in the document's ``page_content``.
        document_end: End of the span in the document's ``page_content``.
        document_text: The span as it stands in the document.
        metadata: The document's metadata.
    """

    document: int
    document_id: str | None
    document_start: int
    document_end: int
    document_text: str
    metadata: dict[str, Any]


class Citation(Passage):
    """A span that an answer shares with a document.

    ``answer[start:end] == text``, in characters. ``text`` and ``document_text`` are the same words and
    punctuation; line breaks, hyphenation and other typography may differ, see
    :mod:`retrieval_copy.citations.words`.

    Attributes:
        text: The span as it stands in the answer.
        start: Its start in the answer.
        end: Its end in the answer.
        num_tokens: Number of words; in scripts without spaces each character counts as a word.
        also_in: Where the other documents contain the span, in order of retrieval.
    """

    text: str
    start: int
    end: int
    num_tokens: int
    also_in: list[Passage]


def cite(
    answer: str, documents: Sequence[Document], *, min_tokens: int = MIN_CITATION_TOKENS
) -> list[Citation]:
    """The maximal spans of whole words that ``answer`` shares with ``documents``, in order of the answer.

    No span can be extended in either direction, by a word or a punctuation mark, and still occur in any
    document; so spans may overlap, but none lies within another. If several documents contain a span, the
    citation points to its first occurrence in the first of them, and ``also_in`` names the others.

    Spans of at least ``min_tokens`` words are found in time linear in the length of all texts (matching
    statistics over a suffix automaton of the answer); each is then searched for in every document.

    Raises:
        ValueError: ``min_tokens`` is below 1.
    """
    if min_tokens < 1:
        raise ValueError(f"min_tokens must be at least 1, got {min_tokens}")
    texts = list(dict.fromkeys(document.page_content for document in documents))
    written, *others = readings([answer, *texts])
    by_text = dict(zip(texts, others, strict=True))
    found = []
    for start, end, num_words in _spans(written, others, min_tokens):
        passages = _passages(written.symbols[start:end], documents, by_text)
        first, last = written.original_span(start, end)
        found.append(
            Citation(
                text=answer[first:last],
                start=first,
                end=last,
                num_tokens=num_words,
                **passages[0],
                also_in=passages[1:],
            )
        )
    return found


def _spans(answer: Reading, documents: Sequence[Reading], min_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Start and end, in symbols of the answer, and number of words of every citation."""
    num_words_before = list(accumulate(map(is_word, answer.symbols), initial=0))
    if num_words_before[-1] < min_tokens:
        return
    automaton = SuffixAutomaton(answer.symbols)
    known = set(answer.symbols)
    for document in documents:
        if not known.isdisjoint(document.symbols):
            automaton.read(document.symbols)
    lengths = automaton.shared_lengths()
    for end, length in enumerate(lengths, start=1):
        goes_on = end < len(lengths) and lengths[end] == length + 1
        num_words = num_words_before[end] - num_words_before[end - length]
        if not goes_on and num_words >= min_tokens:
            yield end - length, end, num_words


def _passages(
    symbols: Sequence[str], documents: Sequence[Document], by_text: dict[str, Reading]
) -> list[Passage]:
    """Where ``symbols`` first occur in each document; a document that was retrieved twice counts once."""
    found: list[Passage] = []
    seen: set[tuple[str, str | None, str]] = set()
    for number, document in enumerate(documents):
        span = by_text[document.page_content].find(symbols)
        key = (document.page_content, document.id, str(document.metadata))
        if span is None or key in seen:
            continue
        seen.add(key)
        found.append(
            Passage(
                document=number,
                document_id=document.id,
                document_start=span[0],
                document_end=span[1],
                document_text=document.page_content[slice(*span)],
                metadata=document.metadata,
            )
        )
    return found


def document_name(passage: Passage) -> str:
    """What a reader knows the document by: its source, title or id, or its place in order of retrieval."""
    metadata = passage["metadata"]
    name = metadata.get("source") or metadata.get("title") or passage["document_id"]
    return str(name or f"document {passage['document'] + 1}")


def document_and_page(passage: Passage) -> str:
    """The document's name and, if it has pages, the page."""
    page = passage["metadata"].get("page")
    return document_name(passage) if page is None else f"{document_name(passage)}, page {page}"


def citation_annotations(citations: Sequence[Citation]) -> list[CitationAnnotation]:
    """``citations`` as LangChain's standard annotations of a text block.

    ``cited_text`` is the span as it stands in the document. ``url`` is the document's ``url``, or its
    ``source`` if that is a URL; ``title`` is its ``title``, ``source`` or id. ``extras`` holds the document's
    ``source`` and ``page``, if it has them, its index and id and the span's offsets in it, and in ``also_in``
    the annotations of the other documents that contain the span.
    """
    annotations = list(map(_annotation, citations))
    for citation, annotation in zip(citations, annotations, strict=True):
        annotation["start_index"], annotation["end_index"] = citation["start"], citation["end"]
        if citation["also_in"]:
            annotation["extras"]["also_in"] = list(map(_annotation, citation["also_in"]))
    return annotations


def _annotation(passage: Passage) -> CitationAnnotation:
    annotation = CitationAnnotation(type="citation", cited_text=passage["document_text"])
    metadata = passage["metadata"]
    source = metadata.get("source")
    if title := metadata.get("title") or source or passage["document_id"]:
        annotation["title"] = str(title)
    if url := metadata.get("url") or (source if "://" in str(source) else None):
        annotation["url"] = str(url)
    annotation["extras"] = {
        "document": passage["document"],
        "document_id": passage["document_id"],
        "document_start": passage["document_start"],
        "document_end": passage["document_end"],
        **{name: metadata[name] for name in ("source", "page") if name in metadata},
    }
    return annotation
