"""Recall on the folder of invented files: the figure that the documentation gives."""

from __future__ import annotations

import pytest

from benchmarks.retrieval_recall import folder, measure, ranked


def test_words_find_the_passage_that_answers_among_the_first_three() -> None:
    corpus = folder()
    way, search = next(iter(ranked(corpus)))
    assert way == "words"
    found = [any(map(is_right, search(question)[:3])) for question, is_right in corpus.questions]
    assert sum(found) >= 0.95 * len(found)


@pytest.mark.slow
def test_words_and_meaning_find_it_first() -> None:
    recall = measure(folder())
    assert recall["both"]["1"] >= 0.85
    assert recall["both"]["3"] >= 0.95
    assert recall["words"]["3"] >= 0.95
