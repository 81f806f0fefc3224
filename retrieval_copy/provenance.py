"""Which spans of an answer stand word for word in the documents: citations that are facts and not claims.

Computed from the texts alone. How the answer was decoded, by which model and whether anything was copied
makes no difference. Knows texts and LangChain documents; does not know models or retrievers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

from langchain_core.documents import Document
from langchain_core.messages.content import Citation as CitationAnnotation

from retrieval_copy.suffix_automaton import SuffixAutomaton
from retrieval_copy.words import is_word, offsets, pieces

MIN_CITATION_TOKENS = 8
"""Words that a span must have to be cited, unless told otherwise."""


class Citation(TypedDict):
    """A span that an answer shares with a document.

    ``answer[start:end] == document.page_content[document_start:document_end] == text``, in characters.

    Attributes:
        text: The span.
        start: Where it begins in the answer.
        end: Where it ends there.
        num_tokens: Its words; in scripts without spaces each character is one.
        document: Number of the document in the order of retrieval, from 0.
        document_id: Its ``id``, if it has one.
        document_start: Where the span begins in its ``page_content``.
        document_end: Where it ends there.
        metadata: The document's metadata.
    """

    text: str
    start: int
    end: int
    num_tokens: int
    document: int
    document_id: str | None
    document_start: int
    document_end: int
    metadata: dict[str, Any]


def cite(
    answer: str, documents: Sequence[Document], *, min_tokens: int = MIN_CITATION_TOKENS
) -> list[Citation]:
    """The maximal spans of whole words that ``answer`` shares with ``documents``, in order of the answer.

    No span can be made longer in either direction, by a word, a sign or white space between words, and still
    stand in any document; so spans may overlap where documents do, but none lies within another. Of several
    documents that contain a span the first is cited, and there the first place.

    Takes time linear in the length of all texts (matching statistics over a suffix automaton of the answer).

    Args:
        answer: Any text.
        documents: In the order of retrieval.
        min_tokens: Words that a span must have.

    Raises:
        ValueError: ``min_tokens`` is below 1.
    """
    if min_tokens < 1:
        raise ValueError(f"min_tokens must be at least 1, got {min_tokens}")
    spans = _spans(pieces(answer), documents, min_tokens)
    return [_citation(answer, start, end, count, documents) for start, end, count in spans]


def _spans(
    parts: list[str], documents: Sequence[Document], min_tokens: int
) -> Iterator[tuple[int, int, int]]:
    """Begin, end and number of words of every citation, in characters of the answer."""
    num_words_before = offsets(["w" if is_word(part) else "" for part in parts])
    if num_words_before[-1] < min_tokens:
        return
    automaton = SuffixAutomaton(parts)
    known = set(parts)
    for text in dict.fromkeys(document.page_content for document in documents):
        found = pieces(text)
        if not known.isdisjoint(found):
            automaton.read(found)
    places = offsets(parts)
    last_end = -1
    # From the left, so of two spans with one end the longer comes first, and of two with one start the
    # shorter.
    trimmed = [_trimmed(parts, *span) for span in _maximal(automaton.shared_lengths())]
    for number, (start, end) in enumerate(trimmed):
        count = num_words_before[end] - num_words_before[start]
        # Without the white space at its ends, a span may lie within a neighbour.
        within_next = number + 1 < len(trimmed) and trimmed[number + 1][0] <= start
        if count >= min_tokens and end > last_end and not within_next:
            last_end = end
            yield places[start], places[end], count


def _maximal(shared_lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of the spans that cannot be made longer."""
    for end, length in enumerate(shared_lengths, start=1):
        goes_on = end < len(shared_lengths) and shared_lengths[end] == length + 1
        if length and not goes_on:
            yield end - length, end


def _trimmed(parts: list[str], start: int, end: int) -> tuple[int, int]:
    while start < end and parts[start].isspace():
        start += 1
    while start < end and parts[end - 1].isspace():
        end -= 1
    return start, end


def _citation(answer: str, start: int, end: int, count: int, documents: Sequence[Document]) -> Citation:
    text = answer[start:end]
    number, place = next(
        (number, place)
        for number, document in enumerate(documents)
        if (place := document.page_content.find(text)) >= 0
    )
    document = documents[number]
    return Citation(
        text=text,
        start=start,
        end=end,
        num_tokens=count,
        document=number,
        document_id=document.id,
        document_start=place,
        document_end=place + len(text),
        metadata=document.metadata,
    )


def citation_annotations(citations: Sequence[Citation]) -> list[CitationAnnotation]:
    """``citations`` as LangChain's standard annotations of a text block.

    ``url`` is the document's ``url``, or its ``source`` if that is an address; ``title`` its ``title`` or
    ``source``. Where the span stands in the document, and which it is, is under ``extras``.
    """
    return [_annotation(citation) for citation in citations]


def _annotation(citation: Citation) -> CitationAnnotation:
    annotation = CitationAnnotation(
        type="citation",
        start_index=citation["start"],
        end_index=citation["end"],
        cited_text=citation["text"],
    )
    metadata = citation["metadata"]
    source = metadata.get("source")
    if title := metadata.get("title") or source or citation["document_id"]:
        annotation["title"] = str(title)
    if url := metadata.get("url") or (source if "://" in str(source) else None):
        annotation["url"] = str(url)
    annotation["extras"] = {
        name: citation[name] for name in ("document", "document_id", "document_start", "document_end")
    }
    return annotation
