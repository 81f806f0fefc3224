"""Which answers the grammar of quotations allows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from retrieval_copy.citations.questions import Question
from retrieval_copy.citations.quoting import quoting_grammar
from retrieval_copy.citations.sentences import placed_sentences
from retrieval_copy.citations.support import NOT_HELD


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Open it at 80 °C. Never before!", ["Open it at 80 °C.", "Never before!"]),
        ("# Kiln\n\nOpen it late.\n- one item\n- two", ["Kiln", "Open it late.", "one item", "two"]),
        ("1. First fire it.\n2. Then cool it.", ["First fire it.", "Then cool it."]),
        ("Use wood, e.g. beech, and wait.", ["Use wood, e.g. beech, and wait."]),
        ('"When?" he asked. In 1963.', ['"When?" he asked.', "In 1963."]),
        (
            "As of Oct. 1, 2020 it is law. Dr. J. Smith of the U.S. Navy left at 5 p.m. Then it rained.",
            ["As of Oct. 1, 2020 it is law.", "Dr. J. Smith of the U.S. Navy left at 5 p.m. Then it rained."],
        ),
        (
            "Nutzen Sie z. B. Holz. Siehe Nr. 5 bzw. Art. 7.",
            ["Nutzen Sie z. B. Holz.", "Siehe Nr. 5 bzw. Art. 7."],
        ),
        ("窑炉冷却。请戴手套。", ["窑炉冷却。", "请戴手套。"]),
        ("A line that\nis broken. Another.", ["A line that is broken.", "Another."]),
        ("x" * 700, []),
        (" \n\n* *\n", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert [one.text for one in placed_sentences(text)] == expected


def test_a_quotation_is_up_to_three_sentences_in_a_row() -> None:
    grammar = quoting_grammar(
        ["One is first here. Two is next. Three. Four is last here."], Question("which is first")
    )
    assert grammar is not None
    assert NOT_HELD not in grammar
    other = quoting_grammar(["One is first here. Two is next."], Question("why does sourdough rise"))
    assert other is not None
    assert NOT_HELD in other
    assert '"One is first here." (" Two is next." (" Three.")?)?' in grammar
    assert '"Three."' not in grammar.split("QUOTATION:")[1].replace(
        '" Three."', ""
    )  # too short to begin with


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("How many books may a member borrow?", "A member may borrow five books."),
        ("When is the library open?", "It is open on Tuesdays."),
        ("When does the fair take place?", "It takes place on 20 July."),
        ("Who waters the garden in August?", "Henrik waters the garden in August."),
    ],
)
def test_the_sentence_that_answers_comes_first(question: str, first: str) -> None:
    library = "# Handbook > Library\nThe library holds four thousand books. It is open on Tuesdays. "
    library += "A member may borrow five books. A member pays 20 cents a day for a late book."
    minutes = "4. Summer fair. It takes place on 20 July. The fair has a brass band. Old books are sold."
    garden = "# Minutes\nThe garden is watered in the evening in August. Henrik waters the garden in August."
    grammar = quoting_grammar([library, minutes, garden], Question(question))
    assert grammar is not None
    assert grammar.split("QUOTATION: ")[1].startswith(f'"{first}"')
    assert " | " not in grammar


def test_a_question_is_no_answer() -> None:
    grammar = quoting_grammar(
        ["When is it open? It opens at nine each day. Why so late? Ask us."], Question("open")
    )
    assert grammar is not None
    assert grammar.endswith('QUOTATION: "It opens at nine each day."')


def test_without_sentences_there_is_no_grammar() -> None:
    assert quoting_grammar([], Question("what")) is None
    assert quoting_grammar(["", "- \n\n***"], Question("what")) is None


def test_of_long_passages_the_nearest_sentences_can_be_quoted() -> None:
    filler = " ".join(f"Line {number} speaks of other things." for number in range(5_000))
    grammar = quoting_grammar(
        [f"{filler} The porcupine sleeps by day."], Question("When does a porcupine sleep?")
    )
    assert grammar is not None
    assert "porcupine" in grammar
    assert len(grammar) < 25_000


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=80), max_size=3))
def test_any_text_gives_a_valid_grammar(passages: list[str]) -> None:
    grammar = quoting_grammar(passages, Question("what"))
    assert grammar is None or not LLMatcher.validate_grammar(grammar)
