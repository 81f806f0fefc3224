"""Sentences that several points have in common."""

from hypothesis import given
from hypothesis import strategies as st

from sot_chains.evaluation.mistakes import is_looped
from sot_chains.filters.repeats import RepeatedSentences
from sot_chains.filters.reply_text import AnswerRenderer
from sot_chains.outline.skeleton import Point

SAID = "It is important to drink some water every single day."
OTHER = "Walk for half an hour after lunch."
SENTENCES = st.sampled_from(
    [SAID, OTHER, "Yes.", "Version 3.5 is out, and here is a line of ten words.", "A\nB", "```"]
)
POINTS = st.lists(st.lists(SENTENCES, max_size=5).map(" ".join), max_size=6)


def whole(texts: list[str], introduction: str = "") -> str:
    renderer = AnswerRenderer(": ", RepeatedSentences())
    return renderer.whole(
        [(None, introduction), *((Point(n, f"P{n}"), text) for n, text in enumerate(texts, 1))]
    )


def test_the_third_time_a_sentence_is_left_out() -> None:
    text = whole([f"{SAID} {OTHER}", f"{OTHER} {SAID}", f"{OTHER} So it is. {SAID} Yes."], introduction=SAID)
    assert text.count(SAID) == 2
    assert text.endswith(f"3. **P3**: {OTHER} So it is. Yes.")


def test_a_point_keeps_its_only_sentence() -> None:
    assert whole([SAID, SAID, f"{SAID} {SAID}"]).endswith(f"3. **P3**: {SAID}")


def test_code_is_left_as_it_is() -> None:
    code = "```\nfor each of the words in the list do print it\n```"
    assert whole([code, code, code]).count(code) == 3


@given(POINTS, st.integers(1, 9))
def test_a_stream_and_the_whole_leave_out_the_same(texts: list[str], size: int) -> None:
    renderer = AnswerRenderer(": ", RepeatedSentences())
    streamed = ""
    for number, text in enumerate(texts, 1):
        point = Point(number, f"P{number}")
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        streamed += "".join(renderer.add(point, piece) for piece in ["", *pieces])
    assert streamed + renderer.end() == whole(texts)


@given(POINTS)
def test_nothing_is_left_out_where_nothing_is_repeated(texts: list[str]) -> None:
    plainly = AnswerRenderer(": ").whole((Point(n, f"P{n}"), text) for n, text in enumerate(texts, 1))
    if not is_looped(plainly):
        assert " ".join(whole(texts).split()) == " ".join(plainly.split())
