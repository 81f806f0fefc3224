from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from retrieval_copy.citations.suffix_automaton import SuffixAutomaton

SYMBOLS = st.lists(st.sampled_from("abc"), max_size=14)


def shared_lengths_by_looking(sequence: list[str], others: list[list[str]]) -> list[int]:
    joined = ["".join(other) for other in others]
    text = "".join(sequence)
    return [
        max(
            length
            for length in range(end + 1)
            if not length or any(text[end - length : end] in other for other in joined)
        )
        for end in range(1, len(text) + 1)
    ]


@given(SYMBOLS, st.lists(SYMBOLS, max_size=4))
def test_it_finds_what_looking_finds(sequence: list[str], others: list[list[str]]) -> None:
    automaton = SuffixAutomaton(sequence)
    for other in others:
        automaton.read(other)
    assert automaton.shared_lengths() == shared_lengths_by_looking(sequence, others)


def test_nothing_is_shared_with_nothing() -> None:
    assert SuffixAutomaton("").shared_lengths() == []
    assert SuffixAutomaton("ab").shared_lengths() == [0, 0]


def test_a_long_repetition_takes_one_pass() -> None:
    automaton = SuffixAutomaton("a" * 5_000)
    automaton.read("a" * 200_000)
    assert automaton.shared_lengths()[-1] == 5_000
