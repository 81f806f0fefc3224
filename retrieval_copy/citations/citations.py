"""Finds the spans of an answer that occur in the documents, and cites them.

Compares the texts only, so citations work for any model and any way of decoding. Knows texts and LangChain
documents; does not know models or retrievers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypedDict

import regex
from langchain_core.documents import Document
from langchain_core.messages.content import Citation as CitationAnnotation

from retrieval_copy.citations.words import Reading, is_word, normalised, readings

MIN_CITATION_TOKENS = 8
"""Default minimum number of words in a citation."""


# The last word of a text, which may go on, and those before it that a dash may join to it.
_UNFINISHED = regex.compile(r"(?:\S*[\p{Pd}\u00ad\u2212\u2043\u00ac]\s+)*\S*\Z")


class Passage(TypedDict):
    """A span of a document.

    ``document_text == document.page_content[document_start:document_end]``, in characters.
    """

    document: int  # its index in order of retrieval, from 0
    document_id: str | None
    document_start: int  # in its page_content
    document_end: int
    document_text: str  # the span as it stands in the document
    metadata: dict[str, Any]  # the document's


class Citation(Passage):
    """A span that an answer shares with a document.

    ``answer[start:end] == text``, in characters. ``text`` and ``document_text`` are the same words and
    punctuation; line breaks, hyphenation and other typography may differ, see
    :mod:`retrieval_copy.citations.words`.
    """

    text: str  # the span as it stands in the answer
    start: int
    end: int
    num_tokens: int  # words; in scripts without spaces each character counts as one
    also_in: list[Passage]  # where the other documents contain it, in order of retrieval


def cite(
    answer: str, documents: Sequence[Document], *, min_tokens: int = MIN_CITATION_TOKENS
) -> list[Citation]:
    """The maximal spans of whole words that ``answer`` shares with ``documents``, in order of the answer.

    No span can be extended in either direction, by a word or a punctuation mark, and still occur in any
    document; so spans may overlap, but none lies within another. If several documents contain a span, the
    citation points to its first occurrence in the first of them, and ``also_in`` names the others.

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


class CitationStream:
    """The citations of a text that arrives in pieces: each comes once it cannot grow any more."""

    def __init__(self, documents: Sequence[Document], *, min_tokens: int = MIN_CITATION_TOKENS) -> None:
        self._cite = partial(cite, documents=documents, min_tokens=min_tokens)
        self._text = ""
        self.num_given = 0

    def feed(self, piece: str) -> list[Citation]:
        """The citations that end before the last whole word of the text so far, and have not been given."""
        self._text += piece
        whole = _UNFINISHED.sub("", self._text)
        found = self._cite(whole)[self.num_given :]
        ended = [one for one in found if normalised(whole[one["end"] :]).text.strip()]
        self.num_given += len(ended)
        return ended


def _spans(answer: Reading, documents: Sequence[Reading], min_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Start and end, in symbols of the answer, and number of words of every citation."""
    symbols = answer.symbols
    num_words_before = list(accumulate(map(is_word, symbols), initial=0))
    seeds = set(_runs(symbols, min_tokens))
    near = [document for document in documents if not seeds.isdisjoint(_runs(document.symbols, min_tokens))]
    start = 0
    for end in range(1, len(symbols) + 2):
        before = start
        while start < end and not (
            end <= len(symbols) and any(document.has(symbols[start:end]) for document in near)
        ):
            start += 1
        num_words = num_words_before[end - 1] - num_words_before[before]
        if start > before and num_words >= min_tokens:
            yield before, end - 1, num_words


def _runs(symbols: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(symbols[number:] for number in range(length)), strict=False)


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
    """The document's name and, if they are known, the page and the heading."""
    page, heading = map(passage["metadata"].get, ("page", "heading"))
    parts = (document_name(passage), page and f"page {page}", heading and heading.rpartition(" > ")[2])
    return ", ".join(filter(None, parts))


def citation_annotations(citations: Sequence[Citation]) -> list[CitationAnnotation]:
    """``citations`` as LangChain's standard annotations of a text block.

    ``cited_text`` is the span as it stands in the document. ``url`` is the document's ``url``, or its
    ``source`` if that is a URL; ``title`` is its ``title``, ``source`` or id. ``extras``: ``source``,
    ``page``, index, id, the span's offsets, and in ``also_in`` the annotations of other documents with it.
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
