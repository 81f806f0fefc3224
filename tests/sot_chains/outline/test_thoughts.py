"""The graphs that small models are shown, as they are asked for themselves."""

import pytest

from sot_chains.filters.repeats import RepeatedSentences
from sot_chains.filters.reply_text import AnswerRenderer
from sot_chains.outline.skeleton import Point
from sot_chains.outline.thoughts import GRAPH_EXAMPLES, numbered
from sot_chains.prompts.templates import CHINESE, ENGLISH, language_of


@pytest.mark.parametrize("language", ["en", "zh"])
def test_shown_graphs_are_written_as_they_ask(language: str) -> None:
    for graph in GRAPH_EXAMPLES[language]:
        thoughts = [thought for thought, _ in graph.written]
        assert [point.needs for point in numbered(thoughts)] == [(), (1,)]
        (_, first), (request, second) = graph.turns(is_begun=False)
        assert first in request  # what builds on a text reads it
        assert language_of(f"{graph.question}{first}{second}{graph.conclusion}") == language
        begun = graph.turns(is_begun=True)[1][1]
        assert begun == f"{thoughts[1].name}: {second}"
        assert graph.text.startswith(f"1. {thoughts[0].name}: {first}\n\n2. {thoughts[1].name}: ")


def test_there_are_some_for_each_language_of_the_requests() -> None:
    assert GRAPH_EXAMPLES.keys() == {language_of(ENGLISH.skeleton), language_of(CHINESE.skeleton)}


def test_a_conclusion_does_not_say_the_points_again() -> None:
    said = "Tomatoes need a lot of sun and of water in July. "
    texts = [(Point(1, "Sun"), said), (None, f"{said}So plant them in the south of the garden.")]
    whole = AnswerRenderer(": ", RepeatedSentences(most_times=1)).whole(texts)
    assert [part.strip() for part in whole.split("\n\n")] == [
        f"1. **Sun**: {said.strip()}",
        "So plant them in the south of the garden.",
    ]
    renderer = AnswerRenderer(": ", RepeatedSentences(most_times=1))
    pieces = [renderer.add(point, character) for point, text in texts for character in text]
    assert "".join([*pieces, renderer.end()]) == whole
    again = AnswerRenderer(": ", RepeatedSentences(most_times=1)).whole([texts[0], (None, said)])
    assert again.count("Tomatoes") == 2  # what would be empty keeps its first sentence


def test_no_number_is_left_of_an_item_that_is_left_out() -> None:
    items = "Ask what your greatest strength at work is. 2. Ask what your greatest weakness at work is."
    repeats = RepeatedSentences(most_times=1)
    assert repeats.feed(items) + repeats.end() == items
    again = repeats.feed(f"First of all, think about it. {items}") + repeats.end()
    assert again.strip() == "First of all, think about it."
