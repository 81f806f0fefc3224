"""Finds the spans of an answer that occur verbatim in the documents, and cites them.

Compares the texts only, so citations work for any model and any way of decoding. Knows texts and LangChain
documents; does not know models or retrievers.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypedDict

import regex
from langchain_core.documents import Document
from langchain_core.messages.content import Citation as CitationAnnotation


class SuffixAutomaton:
    """Finds the longest substring ending at each position of a sequence that other sequences contain.

    Args:
        symbols: The sequence.
    """

    def __init__(self, symbols: Sequence[Hashable]) -> None:
        # Per state: transitions by symbol, suffix link, length of the longest string.
        self._next: list[dict[Hashable, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._ends: list[int] = []  # the state of each prefix of the sequence
        for symbol in symbols:
            self._extend(symbol)
        # Per state: length of the longest of its strings that was read, 0 if none.
        self._read = [0] * len(self._length)

    def _extend(self, symbol: Hashable) -> None:
        last = self._ends[-1] if self._ends else 0
        new = self._add({}, 0, self._length[last] + 1)
        state = last
        while state >= 0 and symbol not in self._next[state]:
            self._next[state][symbol] = new
            state = self._link[state]
        if state >= 0:
            target = self._next[state][symbol]
            if self._length[target] != self._length[state] + 1:
                copy = self._add(dict(self._next[target]), self._link[target], self._length[state] + 1)
                self._link[target] = copy
                while state >= 0 and self._next[state].get(symbol) == target:
                    self._next[state][symbol] = copy
                    state = self._link[state]
                target = copy
            self._link[new] = target
        self._ends.append(new)

    def _add(self, following: dict[Hashable, int], link: int, length: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        return len(self._length) - 1

    def read(self, symbols: Iterable[Hashable]) -> None:
        """Marks the substrings of the sequence that ``symbols`` contains, in one pass over ``symbols``."""
        following, link, length, read = self._next, self._link, self._length, self._read
        state = num_matching = 0
        for symbol in symbols:
            target = following[state].get(symbol)
            while target is None and state:
                state = link[state]
                num_matching = length[state]
                target = following[state].get(symbol)
            if target is not None:
                state = target
                num_matching += 1
                read[state] = max(read[state], num_matching)

    def shared_lengths(self) -> list[int]:
        """For each prefix of the sequence, the length of its longest suffix found in anything read."""
        by_length = sorted(range(1, len(self._length)), key=self._length.__getitem__)
        longest = list(self._read)
        for state in reversed(by_length):  # suffixes of a string that was read count as read
            link = self._link[state]
            if longest[state] and link:
                longest[link] = self._length[link]
        for state in by_length:
            longest[state] = longest[state] or longest[self._link[state]]
        return [longest[state] for state in self._ends]


# Scripts without spaces between words: each character counts as a word.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_LETTER = rf"[[\p{{L}}\p{{N}}_]--[{_UNSPACED}]]"
_PIECE = regex.compile(
    rf"[{_UNSPACED}]\p{{M}}*"  # combining marks stay with their base character, here and below
    rf"|(?:{_LETTER}\p{{M}}*)+(?:['’](?:{_LETTER}\p{{M}}*)+)*"
    r"|\s+"
    r"|\X",
    regex.V1,
)
# The same for ASCII, several times as fast.
_ASCII_PIECE = re.compile(r"\w+(?:'\w+)*|\s+|[^\w\s]", re.ASCII)


def pieces(text: str) -> list[str]:
    """Splits ``text`` into words, runs of white space, and single other characters.

    Combining marks stay with their base character, and joined emoji stay together.
    """
    if text.isascii():
        return _ASCII_PIECE.findall(text)
    found: list[str] = _PIECE.findall(text)
    return found


def offsets(parts: Sequence[str]) -> list[int]:
    """Character offset of each part in the joined text, followed by the length of the text."""
    return list(accumulate(map(len, parts), initial=0))


def is_word(piece: str) -> bool:
    """Whether a piece from :func:`pieces` is a word, not white space or punctuation."""
    return piece[0].isalnum() or piece[0] == "_"


def num_words(text: str) -> int:
    """Number of words in ``text``."""
    return sum(map(is_word, pieces(text)))


MIN_CITATION_TOKENS = 8
"""Default minimum number of words in a citation."""


class Citation(TypedDict):
    """A span that an answer shares with a document.

    ``answer[start:end] == document.page_content[document_start:document_end] == text``, in characters.

    Attributes:
        text: The span.
        start: Its start in the answer.
        end: Its end in the answer.
        num_tokens: Number of words; in scripts without spaces each character counts as a word.
        document: Index of the document in order of retrieval, from 0.
        document_id: The document's ``id``, if it has one.
        document_start: Start of the span in the document's ``page_content``.
        document_end: End of the span in the document's ``page_content``.
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

    No span can be extended in either direction, by a word, punctuation or white space between words, and
    still occur in any document; so spans may overlap, but none lies within another. If several documents
    contain a span, the citation points to its first occurrence in the first of them.

    Takes time linear in the length of all texts (matching statistics over a suffix automaton of the answer).

    Args:
        answer: Any text.
        documents: In order of retrieval.
        min_tokens: Minimum number of words in a span.

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
    """Start and end in characters of the answer, and number of words, of every citation."""
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
    # Left to right: of two spans with the same end the longer comes first, of two with the same start the
    # shorter.
    trimmed = [_trimmed(parts, *span) for span in _maximal(automaton.shared_lengths())]
    for number, (start, end) in enumerate(trimmed):
        count = num_words_before[end] - num_words_before[start]
        # A span trimmed of white space may lie within a neighbour.
        within_next = number + 1 < len(trimmed) and trimmed[number + 1][0] <= start
        if count >= min_tokens and end > last_end and not within_next:
            last_end = end
            yield places[start], places[end], count


def _maximal(shared_lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Start and end of the spans that cannot be extended."""
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

    ``url`` is the document's ``url``, or its ``source`` if that is a URL; ``title`` is its ``title``,
    ``source`` or id. ``extras`` holds the document's index and id and the span's offsets in it.
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
