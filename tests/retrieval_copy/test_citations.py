"""Citations against a slow reading of what they promise, on texts with Unicode, repetition and overlap."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document

from retrieval_copy import citation_annotations, cite
from retrieval_copy.citations import is_word, pieces

# Few words, so that passages repeat and overlap; marks, joined emoji, scripts without spaces, line ends.
WORDS = [
    "kiln",
    "Kiln",
    "cone",
    "café",
    "cafe\u0301",
    "naïve",
    "窑",
    "炉",
    "l’eau",
    "80",
    "👩‍🏫",
    "ß",
    "\u200b",
    "กา",
]
GAPS = [" ", " ", " ", "  ", "\n", ", ", ". ", "", "\u00a0", "\t", "—"]
TEXTS = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), max_size=25).map(
    lambda pairs: "".join(word + gap for word, gap in pairs)
)


def occurs(part: list[str], whole: list[str]) -> bool:
    return any(whole[start : start + len(part)] == part for start in range(len(whole) - len(part) + 1))


def spans_by_looking(answer: str, documents: list[str], min_tokens: int) -> set[str]:
    """The texts of all spans that no longer span contains, by trying every one."""
    parts, wholes = pieces(answer), [pieces(document) for document in documents]
    shared = []
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            if parts[start].isspace() or parts[end - 1].isspace():
                continue
            if any(occurs(parts[start:end], whole) for whole in wholes):
                shared.append((start, end))
    return {
        "".join(parts[start:end])
        for start, end in shared
        if sum(map(is_word, parts[start:end])) >= min_tokens
        and not any((a, b) != (start, end) and a <= start and end <= b for a, b in shared)
    }


def check(answer: str, documents: list[Document], min_tokens: int) -> None:
    citations = cite(answer, documents, min_tokens=min_tokens)
    for citation in citations:
        text, document = citation["text"], documents[citation["document"]]
        assert answer[citation["start"] : citation["end"]] == text
        assert document.page_content[citation["document_start"] : citation["document_end"]] == text
        assert citation["num_tokens"] == sum(map(is_word, pieces(text))) >= min_tokens
        assert text == text.strip()
        assert not any(text in other.page_content for other in documents[: citation["document"]])
        assert (citation["document_id"], citation["metadata"]) == (document.id, document.metadata)
    for one, other in pairwise(citations):
        assert one["start"] < other["start"]
        assert one["end"] < other["end"]


@settings(max_examples=150)
@given(TEXTS, st.lists(TEXTS, max_size=4), st.integers(1, 4))
def test_citations_are_literal_maximal_and_of_the_first_document(
    answer: str, texts: list[str], min_tokens: int
) -> None:
    documents = [Document(text, id=str(number)) for number, text in enumerate(texts)]
    check(answer, documents, min_tokens)
    found = {citation["text"] for citation in cite(answer, documents, min_tokens=min_tokens)}
    assert found == spans_by_looking(answer, texts, min_tokens)


@settings(max_examples=150)
@given(st.text(max_size=60), st.lists(st.text(max_size=60), max_size=3), st.data())
def test_citations_are_literal_in_any_text(answer: str, texts: list[str], data: st.DataObject) -> None:
    """The answer is made of parts of the documents, cut anywhere."""
    for text in texts:
        start = data.draw(st.integers(0, len(text)))
        answer += text[start : data.draw(st.integers(start, len(text)))]
    check(answer, [Document(text) for text in texts], 1)


def test_what_is_copied_is_cited_with_offsets_in_both_texts() -> None:
    document = Document("One two three four five six.", id="d", metadata={"source": "a.md", "page": 3})
    (citation,) = cite("He said: two three four five.", [document], min_tokens=4)
    assert citation == {
        "text": "two three four five",
        "start": 9,
        "end": 28,
        "num_tokens": 4,
        "document": 0,
        "document_id": "d",
        "document_start": 4,
        "document_end": 23,
        "metadata": {"source": "a.md", "page": 3},
    }


def test_overlapping_documents_give_overlapping_citations() -> None:
    documents = [Document("a b c d e f"), Document("d e f g h i")]
    citations = cite("a b c d e f g h i", documents, min_tokens=4)
    assert [citation["text"] for citation in citations] == ["a b c d e f", "d e f g h i"]


def test_the_longer_span_wins_over_the_earlier_document() -> None:
    documents = [Document("b c d"), Document("a b c d e")]
    (citation,) = cite("a b c d e", documents, min_tokens=2)
    assert citation["document"] == 1


def test_equal_spans_go_to_the_first_document_and_its_first_place() -> None:
    documents = [Document("x y"), Document("- a b c - a b c"), Document("a b c")]
    (citation,) = cite("a b c", documents, min_tokens=3)
    assert (citation["document"], citation["document_start"]) == (1, 2)


def test_nothing_shorter_than_the_minimum_and_no_part_of_a_word() -> None:
    document = [Document("the kilns are hot today")]
    assert cite("the kiln are hot", document, min_tokens=3) == []
    assert [citation["text"] for citation in cite("the kiln are hot", document, min_tokens=2)] == ["are hot"]
    with pytest.raises(ValueError, match="min_tokens must be at least 1"):
        cite("a", document, min_tokens=0)


def test_ten_thousand_documents_and_rubbish_among_them() -> None:
    entry = "entry {0} of the ledger was paid in full on day {0}"
    documents = [Document(entry.format(number)) for number in range(10_000)]
    documents[17] = Document("\x00\udcff\ufffe" * 500)
    documents.append(Document("entry 7 of the ledger was paid in full"))
    answer = f"See {entry.format(7)[:38]}, and {entry.format(9999)}"
    check(answer, documents, 8)
    assert [citation["document"] for citation in cite(answer, documents)] == [7, 9999]


def test_annotations_are_langchains_standard_ones() -> None:
    documents = [
        Document("one two three", id="7", metadata={"source": "https://example.org/a", "title": "A"})
    ]
    (annotation,) = citation_annotations(cite("so one two three", documents, min_tokens=2))
    assert annotation == {
        "type": "citation",
        "start_index": 3,
        "end_index": 16,
        "cited_text": "one two three",
        "title": "A",
        "url": "https://example.org/a",
        "extras": {"document": 0, "document_id": "7", "document_start": 0, "document_end": 13},
    }
    json.dumps(annotation)
    (without,) = citation_annotations(cite("one two", [Document("one two")], min_tokens=2))
    assert not {"title", "url"} & without.keys()
