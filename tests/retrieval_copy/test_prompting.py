from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from retrieval_copy.citations.questions import Question
from retrieval_copy.prompting import excerpts, nearest_sentences


def count(text: str) -> int:
    return len(text.split())


@given(st.lists(st.text("ab .\n", max_size=80), max_size=6), st.integers(-5, 60))
def test_what_is_shown_fits_and_keeps_the_order(texts: list[str], max_tokens: int) -> None:
    shown = excerpts(texts, Question("a b"), max_tokens=max_tokens, count=count)
    assert sum(map(count, shown.values())) <= max(0, max_tokens)
    assert [*shown] == sorted(shown)
    for number in [*shown][:-1]:
        assert shown[number] == texts[number]


def test_of_a_long_text_the_passages_nearest_to_the_question_are_shown() -> None:
    text = "\n\n".join(f"Passage {number} is about nothing much." + " Indeed." * 40 for number in range(200))
    text += "\n\nThe porcupine sleeps by day." + "\n\nMore of the same." * 200
    asked = Question("When does a porcupine sleep?")
    (excerpt,) = excerpts([text, "second"], asked, max_tokens=200, count=count).values()
    assert "porcupine sleeps by day" in excerpt
    assert count(excerpt) <= 200


@given(st.lists(st.sampled_from(["A b.", "## A", "B b b b.", "C?", "a b\n"]), max_size=9), st.integers(0, 40))
def test_the_sentences_nearest_to_a_question_stand_below_the_path_which_is_said_once(
    parts: list[str], max_tokens: int
) -> None:
    path = "# Title > A\n"
    shown = nearest_sentences(path + "\n\n".join(parts), Question("a b"), max_tokens, count)
    assert count(shown) <= max_tokens
    if shown:
        assert shown.startswith(path)
        lines = [line for line in shown.removeprefix(path).splitlines() if line != "[...]"]
        assert "A" not in lines
        rest = iter(parts)
        assert all(any(line in part for part in rest) for line in lines)  # in their order


def test_the_path_is_counted() -> None:
    text = "# Title\nThe porcupine sleeps by day. It eats bark at night."
    assert nearest_sentences(text, Question("When does a porcupine sleep?"), 10, count) == (
        "# Title\nThe porcupine sleeps by day."
    )
