from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from retrieval_copy.citations.questions import Question
from retrieval_copy.prompting import excerpts


def count(text: str) -> int:
    return len(text.split())


@given(st.lists(st.text("ab .\n", max_size=80), max_size=6), st.integers(-5, 60))
def test_what_is_shown_fits_and_keeps_the_order(texts: list[str], max_tokens: int) -> None:
    shown = excerpts(texts, Question("a b"), max_tokens=max_tokens, count=count)
    assert sum(count(excerpt.text) for excerpt in shown) <= max(0, max_tokens)
    numbers = [excerpt.document for excerpt in shown]
    assert numbers == sorted(set(numbers))
    for excerpt in shown[:-1]:
        assert excerpt.text == texts[excerpt.document]


def test_of_a_long_text_the_passages_nearest_to_the_question_are_shown() -> None:
    text = "\n\n".join(f"Passage {number} is about nothing much." + " Indeed." * 40 for number in range(200))
    text += "\n\nThe porcupine sleeps by day." + "\n\nMore of the same." * 200
    asked = Question("When does a porcupine sleep?")
    (excerpt,) = excerpts([text, "second"], asked, max_tokens=200, count=count)
    assert "porcupine sleeps by day" in excerpt.text
    assert count(excerpt.text) <= 200
