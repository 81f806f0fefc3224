"""Citations against a slow reading of what they promise, on texts with Unicode, repetition and overlap."""

from __future__ import annotations

import json
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

from retrieval_copy import citation_annotations, cite
from retrieval_copy.citations.citations import CitationStream
from retrieval_copy.citations.words import is_word, readings

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
    "ope-\nned",
    "opened",
    "ﬁre",
    "fire",
]
GAPS = [" ", " ", " ", "  ", "\n", ", ", ". ", "", "\u00a0", "\t", "—", " - ", "…", "\u00ad\n"]
TEXTS = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), max_size=25).map(
    lambda pairs: "".join(word + gap for word, gap in pairs)
)


def occurs(part: list[str], whole: list[str]) -> bool:
    return any(whole[start : start + len(part)] == part for start in range(len(whole) - len(part) + 1))


def spans_by_looking(answer: str, documents: list[str], min_tokens: int) -> set[tuple[int, int]]:
    """Start and end of all spans that no longer span contains, by trying every one."""
    written, *others = readings([answer, *documents])
    symbols, wholes = written.symbols, [other.symbols for other in others]
    shared = [
        (start, end)
        for start in range(len(symbols))
        for end in range(start + 1, len(symbols) + 1)
        if any(occurs(symbols[start:end], whole) for whole in wholes)
    ]
    return {
        written.original_span(start, end)
        for start, end in shared
        if sum(map(is_word, symbols[start:end])) >= min_tokens
        and not any((a, b) != (start, end) and a <= start and end <= b for a, b in shared)
    }


def check(answer: str, documents: list[Document], min_tokens: int) -> None:
    citations = cite(answer, documents, min_tokens=min_tokens)
    for citation in citations:
        text = citation["text"]
        assert answer[citation["start"] : citation["end"]] == text
        numbers = []
        for place in (citation, *citation["also_in"]):
            document = documents[place["document"]]
            cited = document.page_content[place["document_start"] : place["document_end"]]
            assert place["document_text"] == cited
            one, other = readings([text, cited])
            assert one.symbols == other.symbols
            assert (place["document_id"], place["metadata"]) == (document.id, document.metadata)
            numbers.append(place["document"])
        assert numbers == sorted(set(numbers))
        assert citation["num_tokens"] >= min_tokens
    for one_citation, next_citation in pairwise(citations):
        assert one_citation["start"] <= next_citation["start"]
        assert one_citation["end"] <= next_citation["end"]


@given(TEXTS, st.lists(TEXTS, max_size=4), st.integers(1, 4))
def test_citations_are_literal_maximal_and_of_the_first_document(
    answer: str, texts: list[str], min_tokens: int
) -> None:
    documents = [Document(text, id=str(number)) for number, text in enumerate(texts)]
    check(answer, documents, min_tokens)
    found = {(each["start"], each["end"]) for each in cite(answer, documents, min_tokens=min_tokens)}
    assert found == spans_by_looking(answer, texts, min_tokens)


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
        "document_text": "two three four five",
        "metadata": {"source": "a.md", "page": 3},
        "also_in": [],
    }


def test_overlapping_documents_give_overlapping_citations() -> None:
    documents = [Document("a b c d e f"), Document("d e f g h i")]
    citations = cite("a b c d e f g h i", documents, min_tokens=4)
    assert [citation["text"] for citation in citations] == ["a b c d e f", "d e f g h i"]


def test_the_longer_span_wins_over_the_earlier_document() -> None:
    documents = [Document("b c d"), Document("a b c d e")]
    (citation,) = cite("a b c d e", documents, min_tokens=2)
    assert citation["document"] == 1


def test_a_passage_of_several_documents_names_them_all() -> None:
    documents = [
        Document("Nothing of it.", id="0"),
        Document("- a b c - a b c", id="1", metadata={"source": "one.md"}),
        Document("x a\nb c", id="2", metadata={"title": "Two"}),
        Document("x a\nb c", id="2", metadata={"title": "Two"}),  # retrieved twice
        Document("a b", id="4"),
        Document("a b c", metadata={"source": "https://example.org/5"}),
    ]
    (citation,) = cite("a b c", documents, min_tokens=3)
    assert (citation["document"], citation["document_start"]) == (1, 2)
    assert [(other["document"], other["document_text"]) for other in citation["also_in"]] == [
        (2, "a\nb c"),
        (5, "a b c"),
    ]
    (annotation,) = citation_annotations([citation])
    two, five = annotation["extras"]["also_in"]
    assert two == {
        "type": "citation",
        "cited_text": "a\nb c",
        "title": "Two",
        "extras": {"document": 2, "document_id": "2", "document_start": 2, "document_end": 7},
    }
    assert (five["title"], five["url"]) == ("https://example.org/5", "https://example.org/5")
    json.dumps(annotation)


def wide(text: str) -> str:
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


SENTENCE = (
    "The first well-known kiln isn't opened - says the “café” - before it reads eighty degrees… and cools."
)
TYPOGRAPHY = {
    "hyphenated at line ends": SENTENCE.replace("opened", "ope-\nned").replace("eighty", "eigh-\r\n  ty"),
    "hyphenated where a hyphen stands": SENTENCE.replace("well-known", "well-\nknown"),
    "hard-wrapped": SENTENCE.replace(" ", "\n"),
    "soft hyphens": SENTENCE.replace("opened", "ope\u00adned").replace("eighty", "eigh\u00ad\nty"),
    "non-breaking spaces": SENTENCE.replace(" ", "\u00a0"),
    "blanks of several kinds": SENTENCE.replace(" ", "\t \u2009\u3000\x0c\u2028"),
    "ligatures": SENTENCE.replace("fi", "ﬁ"),
    "decomposed accents": SENTENCE.replace("é", "e\u0301"),
    "straight quotation marks": SENTENCE.replace("“", '"').replace("”", '"'),
    "other quotation marks": SENTENCE.replace("“", "«").replace("”", "»").replace("'", "’"),
    "dashes": SENTENCE.replace(" - ", "—").replace("well-known", "well\u2011known"),
    "typewriter dashes": SENTENCE.replace(" - ", " -- "),
    "invisible characters": SENTENCE.replace("kiln", "ki\u200bln\u2060").replace(
        "reads", "\ufeffre\u200dads"
    ),
    "wide forms": wide(SENTENCE),
    "dots": SENTENCE.replace("…", "..."),
}


@pytest.mark.parametrize("kind", TYPOGRAPHY)
def test_the_whole_sentence_is_cited_whatever_its_typography(kind: str) -> None:
    typeset = TYPOGRAPHY[kind]
    assert typeset != SENTENCE
    for answered, documented in ((SENTENCE, typeset), (typeset, SENTENCE), (typeset, typeset)):
        document = Document(f"Something else stands before it. {documented}\n\nAnd behind it.")
        answer = f"It is written: {answered} That is all."
        (citation,) = cite(answer, [document])
        assert citation["text"] == answered
        assert citation["document_text"] == documented
        assert answer[citation["start"] : citation["end"]] == answered
        place = slice(citation["document_start"], citation["document_end"])
        assert document.page_content[place] == documented


PLAIN_WORDS = [
    "office",
    "kiln",
    "café",
    "Tür",
    "well-known",
    "don't",
    "80",
    "1914-1918",
    "opening",
    "ﬁre",
    "窑炉",
]


BREAKS = ["-\n", "\u00ad", "\u00ad\n", "\u200b"]


def typeset(word: str, data: st.DataObject) -> str:
    """``word`` as a PDF or a web page may have it."""
    ways = [
        word,
        unicodedata.normalize("NFD", word),
        word.replace("ffi", "ﬃ").replace("'", "’").replace("-", "–"),
        word.replace("-", "-\n").replace("窑炉", "窑\n炉"),
        wide(word),
    ]
    if word.isascii() and word.isalpha():
        place = data.draw(st.integers(1, len(word) - 1))
        ways.append(word[:place] + data.draw(st.sampled_from(BREAKS)) + word[place:])
    return data.draw(st.sampled_from(ways))


@given(st.lists(st.sampled_from(PLAIN_WORDS), min_size=1, max_size=12), st.data())
def test_what_was_set_in_type_is_cited_as_one_span(words: list[str], data: st.DataObject) -> None:
    plain = " ".join(words)
    blanks = st.sampled_from([" ", "\n", "\u00a0", "  ", "\t", "\r\n"])
    document = "".join(typeset(word, data) + data.draw(blanks) for word in words)
    (citation,) = cite(plain, [Document(f"Before. {document} After.")], min_tokens=1)
    assert citation["text"] == plain
    assert citation["document_text"] == document.rstrip()


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
        "extras": {
            "document": 0,
            "document_id": "7",
            "document_start": 0,
            "document_end": 13,
            "source": "https://example.org/a",
        },
    }
    json.dumps(annotation)
    (without,) = citation_annotations(cite("one two", [Document("one two")], min_tokens=2))
    assert not {"title", "url"} & without.keys()


@given(
    answer=TEXTS.filter(lambda text: "-\n" not in text),  # which a later word may join
    texts=st.lists(TEXTS, max_size=3),
    cuts=st.sets(st.integers(0, 200)),
    min_tokens=st.integers(1, 4),
)
def test_citations_of_a_text_in_pieces_are_those_of_the_whole(
    answer: str, texts: list[str], cuts: set[int], min_tokens: int
) -> None:
    documents = [Document(text) for text in (*texts, answer[len(answer) // 3 :])]
    citing = CitationStream(documents, min_tokens=min_tokens)
    ends = sorted({0, *(cut for cut in cuts if cut < len(answer)), len(answer)})
    given = []
    for start, end in pairwise(ends):
        new = citing.feed(answer[start:end])
        assert all(answer[one["start"] : one["end"]] == one["text"] and one["end"] <= end for one in new)
        given += new
    whole = cite(answer, documents, min_tokens=min_tokens)
    assert given == whole[: citing.num_given]
    assert given + whole[citing.num_given :] == whole
