"""Misses of reference copy are told apart by what the drafter considered and what it drafted."""

from __future__ import annotations

from benchmarks.copy_fit import KnownAnswer
from benchmarks.copy_misses import kind_of_miss, longest_span, misses
from benchmarks.copy_steps import oracle_forwards
from local_backend import Draft
from local_backend.drafting.copy_tree import Source

DOCUMENT = (1, 2, 3, 4, 5, 6, 7, 8)


def test_the_longest_span_begins_where_the_answer_goes_on() -> None:
    assert longest_span([DOCUMENT, (3, 4, 9)], (3, 4, 9, 9)) == 3
    assert longest_span([DOCUMENT], (7, 8, 1)) == 2
    assert longest_span([DOCUMENT], (9, 1, 2)) == 0
    assert longest_span([tuple(range(30))], tuple(range(30))) == 19


def test_a_miss_has_one_kind() -> None:
    sources = [Source(DOCUMENT, 2, 0, ()), Source(DOCUMENT, 4, 5, ())]
    assert kind_of_miss(Draft(), sources, (7, 8)) == "no source at the start"
    assert kind_of_miss(Draft(), sources, (3, 4)) == "nothing drafted at the start, a guess"
    assert kind_of_miss(Draft.chain((3,)), sources, (5, 6)) == "others drafted at the start, 3+ matching"
    assert kind_of_miss(Draft.chain((3,)), sources, (3, 4)) == "nothing drafted on the way, a guess"
    assert kind_of_miss(Draft.chain((3, 9)), sources, (3, 4)) == "others drafted on the way, a guess"
    assert kind_of_miss(Draft.chain((3,)), sources, (3, 9)) == "no source on the way"


def test_what_is_copied_whole_has_misses_only_where_it_begins() -> None:
    case = KnownAnswer((90, 91), (tuple(range(60)),), tuple(range(10, 50)))
    times, tokens = misses([case])
    assert set(times) == set(tokens)
    assert sum(times.values()) <= 2
    assert oracle_forwards(case)[0] == 2
