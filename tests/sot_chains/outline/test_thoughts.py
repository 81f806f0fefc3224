"""The graphs that small models are shown, as they are asked for themselves."""

import pytest

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
