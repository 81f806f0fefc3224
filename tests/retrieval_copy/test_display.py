from __future__ import annotations

import re
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from rich.console import Console

from retrieval_copy import RetrievalCopyChain, cite
from retrieval_copy.display import CitedAnswer, CitedPassage, segments
from tests.retrieval_copy.citations.test_citations import TEXTS
from tests.retrieval_copy.fakes import CLAY, GLAZE, QUESTION, QuotingModel, retriever


@pytest.fixture(scope="module")
def answer() -> AIMessage:
    return RetrievalCopyChain(retriever(CLAY, GLAZE), QuotingModel()).invoke(QUESTION)


@given(TEXTS, st.lists(TEXTS, max_size=3))
def test_the_segments_joined_are_the_text(text: str, texts: list[str]) -> None:
    citations = cite(text, [Document(other) for other in texts], min_tokens=1)
    parts = segments(text, citations)
    assert "".join(part.text for part in parts) == text
    for part in parts:
        assert part.citation is None or part.text in part.citation["text"]
    covered = {place for citation in citations for place in range(citation["start"], citation["end"])}
    assert sum(len(part.text) for part in parts if part.citation) == len(covered)


def test_notebooks_show_it_too_and_escape_what_is_shown() -> None:
    document = Document("use <b>bold</b> & more of it", metadata={"source": '<script>"x"'})
    model = QuotingModel()
    message = RetrievalCopyChain(retriever(document), model, min_citation_tokens=2).invoke(QUESTION)
    shown = CitedAnswer(message)._repr_mimebundle_((), ())["text/html"]
    assert shown.count("[1]") == 2
    assert "<script>" not in shown
    assert "<b>" not in shown


def test_terminals_show_the_answer_and_its_sources(answer: AIMessage) -> None:
    console = Console(record=True, width=300, force_terminal=True, color_system="truecolor", file=StringIO())
    console.print(CitedAnswer(answer))
    text = console.export_text(clear=False)
    assert re.sub(r"\[\d\]", "", text.split("\n")[0]) == answer.text
    assert re.findall(r"(\w+)\.\[(\d)\]", text) == [("glows", "1"), ("too", "2")]
    assert "[1] https://example.org/clay.html" in text
    assert "[2] glaze.md" in text
    assert "also in" not in text
    assert "\x1b[" in console.export_text(styles=True)


def test_the_other_documents_of_a_passage_are_shown() -> None:
    answer = RetrievalCopyChain(retriever(CLAY), QuotingModel()).invoke(QUESTION)
    copies = [Document(CLAY.page_content, metadata={"source": name}) for name in ("a.md", "a.md", "b.md")]
    answer.response_metadata["citations"] = cite(answer.text, copies)
    console = Console(record=True, width=300, file=StringIO())
    console.print(CitedAnswer(answer))
    assert ", also in b.md: " in console.export_text()


@pytest.mark.parametrize("cited", ["Two is here", "打开窑炉。", "- first item"])
def test_what_is_cited_is_highlighted_in_its_passage(cited: str) -> None:
    document = Document(f"One. {cited} Three?", metadata={"source": "<a>.pdf", "page": 3})
    (citation,) = cite(cited, [document], min_tokens=1)
    plain = Console(record=True, width=300, file=StringIO())
    plain.print(CitedPassage(document, citation))
    assert plain.export_text() == f"<a>.pdf, page 3\nOne. >>>{cited}<<< Three?\n"
    coloured = Console(record=True, width=300, force_terminal=True, color_system="truecolor", file=StringIO())
    coloured.print(CitedPassage(document, citation))
    assert coloured.export_text() == f"<a>.pdf, page 3\nOne. {cited} Three?\n"


def test_a_message_without_citations_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an answer of RetrievalCopyChain"):
        CitedAnswer(AIMessage("x"))
