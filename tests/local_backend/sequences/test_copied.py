"""Copied spans are literally in the reference, as long as they can be, and never overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_backend.sequences.outputs import Completion, CopiedSpan, Stats


def copied_spans(answer: list[int], references: list[list[int]], min_tokens: int) -> tuple[CopiedSpan, ...]:
    completion = Completion(answer, "", "stop", Stats(), 0, references=references)
    return completion.copied_spans(min_tokens)


TEXTS = st.lists(st.integers(0, 3), max_size=30)


@given(answer=TEXTS, references=st.lists(TEXTS, max_size=3), min_tokens=st.integers(1, 5))
def test_spans_are_literal_maximal_and_apart(
    answer: list[int], references: list[list[int]], min_tokens: int
) -> None:
    spans = copied_spans(answer, references, min_tokens)
    end = 0
    for span in spans:
        assert span.start >= end
        assert span.num_tokens >= min_tokens
        end = span.start + span.num_tokens
        reference = references[span.reference]
        there = span.reference_start + span.num_tokens
        assert answer[span.start : end] == reference[span.reference_start : there]
        assert end == len(answer) or there == len(reference) or answer[end] != reference[there]
    covered = {place for span in spans for place in range(span.start, span.start + span.num_tokens)}
    for start in range(len(answer) - min_tokens + 1):
        if not covered & set(range(start, start + min_tokens)):
            window = answer[start : start + min_tokens]
            for reference in references:
                starts = range(len(reference) - min_tokens + 1)
                assert all(reference[place : place + min_tokens] != window for place in starts)


def test_the_longest_wins_and_then_the_first() -> None:
    answer = [9, 1, 2, 3, 4, 9]
    assert copied_spans(answer, [[1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4]], 3) == (CopiedSpan(1, 4, 1, 1),)


def test_a_minimum_below_one_is_named() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at least 1, got 0"):
        copied_spans([1], [[1]], 0)
