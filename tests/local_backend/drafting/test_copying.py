"""Where to copy from and how much: the index, the sources, the tree, and the price of a token."""

from __future__ import annotations

import gc
import random
import time
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_backend import Draft, ReferenceCopy
from local_backend.drafting.copy_sources import COMMON, RESUMED, TRAITS, CopySources
from local_backend.drafting.copy_tree import CopyWeights, Source, Votes, grow, length_class
from local_backend.drafting.reference_copy import FITTED
from local_backend.drafting.suffix_index import (
    BORDER,
    MAX_MATCH_TOKENS,
    GrowingIndex,
    Match,
    SharedIndexes,
    SuffixIndex,
)
from tests.local_backend.drafting.fake_rows import FakeRow, write

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=4)
TEXT = st.lists(st.integers(0, 4), max_size=50)


def _by_comparing(index: SuffixIndex, text: list[int]) -> dict[int, int]:
    """Every place with a match and its length, found by comparing everything."""
    tokens, found = list(index.tokens), {}
    for place in range(1, len(tokens)):
        length = 0
        while length < min(len(text), MAX_MATCH_TOKENS) and tokens[place - 1 - length] == text[-1 - length]:
            length += 1
        if length and tokens[place] != BORDER:
            found[place] = length
    return found


# The index -----------------------------------------------------------------------------------------


@given(TEXTS, TEXT)
def test_the_index_finds_what_comparing_everything_finds(texts: list[list[int]], text: list[int]) -> None:
    index = SuffixIndex(texts)
    found = index.matches(text, limit=10_000)
    assert {match.index: match.num_tokens for match in found} == _by_comparing(index, text)
    assert [match.num_tokens for match in found] == sorted(
        (match.num_tokens for match in found), reverse=True
    )


@given(TEXTS, TEXT, st.integers(1, 5), st.integers(0, 100))
def test_of_too_many_matches_the_longest_and_closest_are_taken(
    texts: list[list[int]], text: list[int], limit: int, near: int
) -> None:
    index = SuffixIndex(texts)
    every = _by_comparing(index, text)
    ranked = sorted((-length, abs(place - near)) for place, length in every.items())
    found = index.matches(text, limit=limit, near=near)
    assert sorted((-match.num_tokens, abs(match.index - near)) for match in found) == ranked[:limit]
    longest = index.longest(text, near=near)
    assert (longest is None) == (not every)
    if longest is not None:
        assert (-longest.num_tokens, abs(longest.index - near)) == ranked[0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 59))
def test_what_a_row_wrote_is_matched_as_it_grows(tokens: list[int], num_at_once: int) -> None:
    written = GrowingIndex()
    for start in range(0, len(tokens), num_at_once):
        written.extend(tokens[start : start + num_at_once])
    found = {match.index: match.num_tokens for match in written.matches(limit=100)}
    want = {}
    for place in range(1, len(tokens)):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length:
            want[place] = length
    latest = sorted(want)[-32:]
    assert found == {place: want[place] for place in latest}


def test_a_text_larger_than_the_key_of_one_sort_is_ordered() -> None:
    """Long repetitions and large ids: several rounds of doubling."""
    rng = random.Random(0)
    block = [rng.randrange(200_000) for _ in range(50)]
    index = SuffixIndex([block * 3 + [7], block])
    found = index.matches(block, limit=10)
    assert [match.num_tokens for match in found] == [MAX_MATCH_TOKENS] * 3
    assert [match.index for match in found] == [51, 101, 151]


def test_memory_is_eight_bytes_a_token() -> None:
    index = SuffixIndex([range(1000), range(500)])
    assert len(index) == 1500
    assert index.tokens.nbytes + index._order.nbytes == 8 * (len(index) + 3)


def test_negative_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="0 or more, got -3"):
        SuffixIndex([[1, -3]])


def test_indexes_are_shared_by_who_passes_the_same_and_the_oldest_go() -> None:
    indexes = SharedIndexes(max_tokens=5)
    one, other, third = ((1, 2, 3),), ((4, 5),), ((6, 7, 8, 9),)
    first = indexes.of(one)
    assert indexes.of(one) is first
    indexes.of(other)
    assert indexes.of(one) is first
    indexes.of(third)
    assert len(indexes) == 1
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    assert len(indexes.of(())) == 0


def test_a_million_tokens_are_indexed_and_searched_in_reasonable_time() -> None:
    """No timing: only that it ends, in a loop that would take hours if a step looked at everything."""
    tokens = np.random.default_rng(0).zipf(1.3, 1_000_000) % 30_000
    index = SuffixIndex([tokens])
    text = tokens[1000:1040].tolist()
    started = time.monotonic()
    for _ in range(200):
        assert index.matches(text, limit=32)
        if time.monotonic() - started > 60:
            pytest.fail("200 searches took a minute")


# Sources -------------------------------------------------------------------------------------------


def _sources(references: list[list[int]], prompt: list[int], *steps: list[int]) -> list[Source]:
    sources = CopySources(SuffixIndex(references), SuffixIndex([prompt]))
    text = list(prompt)
    for step in steps:
        text += step
        sources.extend(text, len(prompt))
    return sources(text)


def test_after_words_of_its_own_a_row_may_come_back_to_where_it_was() -> None:
    reference = list(range(10, 40))
    found = _sources([reference], [1], [10, 11, 12, 13], [99])
    resumed = [source.index for source in found if source.traits[RESUMED]]
    start = 1  # behind the index's border
    assert resumed == [start + 4, start + 5, start + 6, start + 7]
    late = _sources([reference], [1], [10, 11, 12, 13], [99], [98], [97], [96])
    assert not [source for source in late if source.traits[RESUMED]]


def test_the_commonest_tokens_are_always_left_to_guess() -> None:
    found = _sources([[5, 6, 5, 7, 5]], [1], [99])
    common = [source.tokens[source.index] for source in found if source.traits[COMMON]]
    assert common[0] == 5


def test_every_source_has_every_trait() -> None:
    for source in _sources([[1, 2, 3, 1, 2]], [1, 2, 9], [1, 2], [1]):
        assert len(source.traits) == len(TRAITS) == len(FITTED.traits)
    assert length_class(0) == 0
    assert length_class(10_000) == len(FITTED.by_length) - 1
    assert len(FITTED.miss) == 3 + len(FITTED.by_length)


def test_a_row_that_leaves_its_source_often_is_known_to() -> None:
    faithful = CopySources(SuffixIndex([range(100)]), SuffixIndex([[200]]))
    faithful.extend([200, *range(40)], 1)
    fickle = CopySources(SuffixIndex([range(100)]), SuffixIndex([[200]]))
    text = [200]
    for start in range(0, 90, 9):
        for step in (list(range(start, start + 8)), [300]):
            text += step
            fickle.extend(text, 1)
    assert faithful.deviation < fickle.deviation


# The tree ------------------------------------------------------------------------------------------

_EVEN = CopyWeights(traits=(1.0, *[0.0] * 11), by_length=(0.0,) * 8, miss=(-2.0, *[0.0] * 10), sharpness=1.0)


def _grown(sources: list[Source], **options: float) -> Draft:
    limits = {"max_tokens": 50, "max_depth": 50, "min_probability": 0.01, **options}
    return grow(
        sources,
        Votes(_EVEN, deviation=0.0),
        max_tokens=int(limits["max_tokens"]),
        max_depth=int(limits["max_depth"]),
        min_probability=limits["min_probability"],
    )


def test_places_that_agree_outvote_one_that_does_not() -> None:
    votes = [Source((1, 2, BORDER), 0, 1, (0.0,)), Source((5, 6, BORDER), 0, 1, (0.0,))]
    draft = _grown([*votes, Source((5, 7, BORDER), 0, 1, (0.0,))])
    assert draft.token_ids[0] == 5
    assert sorted(draft.token_ids) == [1, 2, 5, 6, 7]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(1, 6),
)
def test_probabilities_fall_and_never_exceed_what_there_is(
    texts: list[list[int]], max_tokens: int, max_depth: int
) -> None:
    draft = _grown(
        [Source((*text, BORDER), 0, 1, (0.0,)) for text in texts], max_tokens=max_tokens, max_depth=max_depth
    )
    assert len(draft) <= max_tokens
    assert max(draft.depths(), default=0) <= max_depth
    assert list(draft.probabilities) == sorted(draft.probabilities, reverse=True)
    for parent in range(-1, len(draft)):
        children = [place for place, other in enumerate(draft.parents) if other == parent]
        whole = 1.0 if parent < 0 else draft.probabilities[parent]
        assert sum(draft.probabilities[child] for child in children) <= whole + 1e-9
        tokens = [draft.token_ids[child] for child in children]
        assert len(set(tokens)) == len(tokens)


def test_a_text_that_repeats_itself_is_continued_past_its_end() -> None:
    draft = _grown([Source([8, 9, 1, 2, 3], 2, 3, (0.0,))], max_depth=7)
    assert draft.token_ids == (1, 2, 3, 1, 2, 3, 1)


# The policy ----------------------------------------------------------------------------------------


def test_copying_an_answer_takes_few_forwards() -> None:
    answer = random.Random(1).choices(range(1000), k=100)
    row = FakeRow([5000], 101, references=((5000, *answer), (1, 2, 3)))
    assert write(ReferenceCopy(), row, lambda text: answer[len(text) - 1]) <= 8


def test_on_average_trees_are_as_large_as_asked_for() -> None:
    rng = random.Random(2)
    references = tuple(tuple(rng.choices(range(30), k=300)) for _ in range(3))
    sizes = {}
    for mean in (4, 12):
        drafter, row = ReferenceCopy(mean_draft_tokens=mean), FakeRow([1, 2], 400, references)
        drafted: list[int] = []
        while row.room > 0:
            (draft,) = drafter.propose([row])
            drafted.append(len(draft))
            row.token_ids.append(rng.randrange(30))
        sizes[mean] = sum(drafted[50:]) / len(drafted[50:])
    assert sizes[4] == pytest.approx(4, abs=1.5)
    assert sizes[12] == pytest.approx(12, abs=3)


@pytest.mark.parametrize("option", ["mean_draft_tokens", "max_draft_tokens", "max_depth"])
def test_numbers_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        ReferenceCopy(**{option: 0})


def test_a_match_is_a_value() -> None:
    assert Match(3, 2) == Match(3, 2)
