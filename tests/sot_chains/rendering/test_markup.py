"""Runs as HTML: what others wrote is text in it, and it needs nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import AIMessage

import retrieval_copy
from sot_chains.display import shown
from sot_chains.rendering import Lane, Run, make_lane
from tests.sot_chains.fakes import QUESTION, PacedChatModel, is_skeleton_request, sot_of

EVIL = "</style><script>alert(1)</script><img src=x onerror=alert(1)> & \"quotes' {0} %s"


class _Read(HTMLParser):
    """The tags, attributes and texts of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


async def _run(question: str = QUESTION, **options: Any) -> Run:
    message = await sot_of(PacedChatModel(**options)).ainvoke(question)
    return Run(question, "paced", (make_lane("sot", "Skeleton-of-Thought", message),))


async def test_a_run_shows_points_calls_and_figures() -> None:
    page = (await _run()).page()
    read = _Read(page)
    assert "1. Fixed hours" in read.texts
    assert "Close the curtains." in read.texts
    assert read.tags.count("svg") == 4  # the outline and three points
    assert {"4", "21"} <= set(read.texts)  # calls, tokens written
    assert not {"script", "link", "img", "iframe"} & set(read.tags)
    assert not re.search(r"(src|href|url\()", page.split("</style>")[1])


async def test_what_a_model_and_a_user_wrote_is_text() -> None:
    def answer(messages: Any) -> str:
        return f"1. {EVIL}\n2. Rest" if is_skeleton_request(str(messages[-1].text)) else f"Well: {EVIL}"

    run = await _run(EVIL, answer=answer)
    for html in (run.page(), run._repr_html_()):
        read = _Read(html)
        assert not {"script", "img"} & set(read.tags)
        assert not any(name.startswith("on") or name == "style" for name, _ in read.attributes)
        assert any("<img src=x" in text for text in read.texts)


def _cited(text: str, *documents: Document) -> AIMessage:
    citations = retrieval_copy.cite(text, documents, min_tokens=3)
    return AIMessage(text, response_metadata={"citations": citations})


def test_copied_spans_are_marked_by_their_source() -> None:
    documents = [Document("the kiln is opened at noon", metadata={"source": EVIL}), Document("a b c d e")]
    message = _cited("As said, the kiln is opened at noon, and a b c d e.", *documents)
    lane = make_lane("copy", "Copying", message, seconds=2.0, first_text_seconds=0.5)
    assert [part.source is None for part in lane.parts] == [True, False, True, False, True]
    assert "".join(part.text for part in lane.parts) == message.text
    read = _Read(Run("q", "m", (lane,)).page())
    assert read.tags.count("mark") == 4  # two spans, two in the legend
    assert ("title", lane.sources[0]) in read.attributes


async def test_the_result_is_a_sentence_and_no_factor_is_shown_for_what_was_not_asked() -> None:
    message = await sot_of(PacedChatModel()).ainvoke(QUESTION)
    sot = make_lane("sot", "Skeleton-of-Thought", message)
    assert sot.seconds is not None
    plain = make_lane("plain", "Plain decoding", AIMessage("Sleep."), seconds=sot.seconds * 3)
    copied = make_lane("copy", "Copying", AIMessage("Rest."), seconds=sot.seconds)
    page = Run(QUESTION, "m", (plain, sot, copied)).fragment()
    assert "3.0 times as fast.</p>" in page
    assert page.count("3.0×") == 2  # in the head of its card and in the table, for one lane of three
    failed = Run(QUESTION, "m", (Lane("plain", "Plain decoding", "no network"), sot)).fragment()
    assert '<p class="verdict failed">Plain decoding failed.</p>' in failed
    assert "times as fast" not in failed


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(TEXTS, TEXTS, TEXTS)
def test_any_text_is_shown_as_it_is(question: str, title: str, note: str) -> None:
    page = Run(question, "m", (Lane("plain", title, note),)).page()
    read = _Read(page)
    assert not {"script", "img"} & set(read.tags)
    assert "".join(read.texts).count(note) >= 1 or not note.strip()


async def test_a_notebook_shows_an_answer_in_the_same_way() -> None:
    message = await sot_of(PacedChatModel()).ainvoke(QUESTION)
    html = shown(message, QUESTION)._repr_html_()
    assert "1. Fixed hours" in html
    assert "<svg" in html
    with pytest.raises(ValueError, match=r'response_metadata\["sot"\]'):
        shown(AIMessage("Hello"))
