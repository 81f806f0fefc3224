"""Recall on the folder of invented files: the figure that the documentation gives."""

from __future__ import annotations

from benchmarks.retrieval_recall import folder, measure


def test_the_passage_that_answers_is_among_the_first_three() -> None:
    recall = measure(folder())
    assert recall["both"]["1"] >= 0.85
    assert recall["both"]["3"] >= 0.95
    assert recall["words"]["3"] >= 0.95
