"""Drafters against made-up models, alone; for several at once see ``test_combined``."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.span_copy import SpanCopy
from local_backend import Combined, Draft, Drafter, Jacobi, Lookahead, Outcome
from local_backend.drafting import make_drafter
from local_backend.drafting.drafter import PerRow
from local_backend.drafting.jacobi import NgramPool
from tests.local_backend.drafting.fake_rows import FakeRow, by_last, by_last_two, by_position, step, write

NAMES = ("autoregressive", "combined", "jacobi", "lookahead", "reference_copy")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_draft_tokens", [1000, 5])
def test_whatever_is_drafted_the_text_is_the_models(name: str, max_draft_tokens: int) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        prompt = [rng.randrange(101) for _ in range(rng.randrange(1, 9))]
        want = list(prompt)
        while len(want) < 60:
            want.append(by_last_two(want))
        row = FakeRow(list(prompt), 60, references=(tuple(want[20:40]), (1, 2, 3)))
        write(make_drafter(name), row, by_last_two, max_draft_tokens=max_draft_tokens)
        assert row.token_ids == want


@pytest.mark.parametrize("name", NAMES)
def test_no_draft_is_deeper_than_the_row_has_room_for(name: str) -> None:
    drafter = make_drafter(name)
    row = FakeRow([1, 2, 1, 2], 12, references=((1, 2) * 30,))
    while row.room > 0:
        (draft,) = drafter.propose([row])
        assert max(draft.depths(), default=0) <= row.room - 1
        step(drafter, row, lambda text: 3 - text[-1])


# What is left of rows ------------------------------------------------------------------------------


def test_a_state_is_made_once_and_goes_with_its_row() -> None:
    made = []
    states: PerRow[list[int]] = PerRow(lambda row: made.append(row.room) or [])  # type: ignore[func-returns-value]  # append returns None
    rows = [FakeRow([1], 5), FakeRow([1], 6)]
    states[rows[0]].append(3)
    assert states[rows[0]] == [3]
    assert states[rows[1]] == []
    assert made == [4, 5]
    del rows
    gc.collect()
    assert len(states) == 0


# Reference copy ------------------------------------------------------------------------------------


def test_the_longest_match_is_copied() -> None:
    row = FakeRow([9, 1, 2, 3], references=((5, 3, 50, 51), (2, 3, 60, 61, 62), (3, 70)))
    (draft,) = SpanCopy(num_copy_tokens=2).propose([row])
    assert draft == Draft.chain([60, 61])


def test_a_short_match_triggers_nothing() -> None:
    row = FakeRow([1, 2, 3], references=((9, 3, 50), (2, 3, 60)))
    assert SpanCopy(min_match_tokens=2).propose([row]) == [Draft.chain([60])]
    assert SpanCopy(min_match_tokens=3).propose([row]) == [Draft()]


def test_of_equal_matches_the_reference_comes_before_own_text() -> None:
    assert SpanCopy().propose([FakeRow([7, 8, 7], references=((7, 1),))]) == [Draft.chain([1])]


def test_no_copy_crosses_into_the_next_reference() -> None:
    row = FakeRow([4, 5], references=((5, 6), (7, 8), (5,)))
    assert SpanCopy().propose([row]) == [Draft.chain([6])]


def test_a_repetition_is_continued_past_its_end() -> None:
    row = FakeRow([1, 2, 3, 1, 2, 3])
    assert SpanCopy(num_copy_tokens=7).propose([row]) == [Draft.chain([1, 2, 3, 1, 2, 3, 1])]


def test_copying_the_answer_takes_few_forwards() -> None:
    answer = random.Random(1).choices(range(1000), k=100)
    row = FakeRow([5000], 101, references=((5000, *answer),))
    assert write(SpanCopy(num_copy_tokens=20), row, lambda text: answer[len(text) - 1]) == 5


# Jacobi --------------------------------------------------------------------------------------------


def test_ngrams_come_back_latest_first_and_the_oldest_goes() -> None:
    pool = NgramPool(3, num_kept=2)
    pool.add([1, 2, 3])
    pool.add([1, 4, 5])
    pool.add([1, 2, 3])
    assert pool.after(1) == [(2, 3), (4, 5)]
    pool.add([1, 6, 7])
    assert pool.after(1) == [(6, 7), (2, 3)]
    assert pool.after(2) == []


def test_a_growing_text_is_read_once() -> None:
    pool, text = NgramPool(2, num_kept=5), [1, 2]
    pool.read(text)
    text += [3, 4]
    pool.read(text)
    pool.read(text)
    assert [pool.after(token) for token in text] == [[(2,)], [(3,)], [(4,)], []]


def test_the_next_guess_is_what_the_model_said_at_the_refused_places() -> None:
    drafter, row = Jacobi(block_size=6, num_recycled=0), FakeRow([1, 2, 3], 50)
    outcome = step(drafter, row, by_position)
    said = list(outcome.predictions)[len(outcome.token_ids) :]
    (draft,) = drafter.propose([row])
    assert list(draft.token_ids[: len(said)]) == said
    assert len(draft) == 6


def test_jacobi_lands_a_block_where_guesses_do_not_spoil_each_other() -> None:
    row = FakeRow([1], 121)
    assert write(Jacobi(block_size=16), row, by_position) <= 120 / 7


def test_a_refused_ngram_is_tried_again_where_it_belongs() -> None:
    """The text repeats after long, so only what the pool holds can be right."""
    text = random.Random(4).choices(range(400), k=60)
    row = FakeRow([*text, 500, text[0]], 62 + 40)
    recycling = write(Jacobi(block_size=1, num_recycled=2), row, lambda now: text[(len(now) - 61) % 60])
    row = FakeRow([*text, 500, text[0]], 62 + 40)
    without = write(Jacobi(block_size=1, num_recycled=0), row, lambda now: text[(len(now) - 61) % 60])
    assert recycling <= 10 < without


# Lookahead -----------------------------------------------------------------------------------------


def test_the_window_has_the_papers_shape() -> None:
    """Every cell sees the oldest iterate up to its diagonal, then its diagonal."""
    row = FakeRow(list(range(100, 140)), 100)
    (draft,) = Lookahead(window_size=4, ngram_size=4).propose([row])
    assert len(draft) <= 4 * 3
    assert sorted(draft.depths(), reverse=True)[0] == 4 + 3 - 1
    (cut,) = Lookahead(window_size=4, ngram_size=4).propose([FakeRow([1, 2, 3], 6)])
    assert max(cut.depths()) == 2


def test_the_window_breeds_ngrams_the_text_then_uses() -> None:
    cycle = [1]
    while len(cycle) < 96:
        cycle.append(by_last(cycle))
    prompt = [*cycle[5::5][::-1], 1]  # tokens of the text to come, with nothing true behind any of them
    row = FakeRow(list(prompt), len(prompt) + 90)
    num_forwards = write(Lookahead(window_size=12, ngram_size=4, num_guesses=4), row, by_last)
    assert row.token_ids[len(prompt) :] == cycle[1:91]
    assert num_forwards <= 90 / 1.5
    row = FakeRow(list(prompt), len(prompt) + 90)
    assert write(SpanCopy(), row, by_last) == 90


def test_the_window_moves_with_the_row() -> None:
    """With one iterate lookahead is Jacobi iteration, and its cells are right where they stand."""
    row = FakeRow([1], 121)
    drafter = Lookahead(window_size=8, ngram_size=2, num_guesses=1)
    assert write(drafter, row, by_position) <= 120 / 4


def test_lookahead_takes_ngrams_from_references() -> None:
    answer = random.Random(1).choices(range(1000), k=60)
    row = FakeRow([5000], 61, references=((5000, *answer),))
    drafter = Lookahead(window_size=1, ngram_size=5)
    assert write(drafter, row, lambda text: answer[len(text) - 1]) <= 60 / 3


# Trees ---------------------------------------------------------------------------------------------


@given(paths=st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6), max_tokens=st.integers(0, 20))
def test_merged_drafts_hold_every_path_once(paths: list[list[int]], max_tokens: int) -> None:
    merged = Draft.merged(map(Draft.chain, paths))
    assert len(merged) == len({tuple(path[: n + 1]) for path in paths for n in range(len(path))})
    for path in paths:
        assert len(merged.nodes_along(path)) == len(path)
    cut = Draft.merged(map(Draft.chain, paths), max_tokens=max_tokens)
    assert len(cut) == min(len(merged), max_tokens)


def test_predictions_along_a_path_end_where_the_draft_does() -> None:
    outcome = Outcome((0,), (5, 9), (5, 9, 8, 7), Draft((5, 6, 5), (-1, 0, -1)))
    assert outcome.predictions_along([5, 6, 1]) == [5, 9, 8]
    assert outcome.predictions_along([4]) == [5]
    assert Outcome((), (5,)).predictions_along([5]) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SpanCopy(min_match_tokens=0), "min_match_tokens must be at least 1, got 0"),
        (lambda: SpanCopy(num_copy_tokens=0), "num_copy_tokens"),
        (lambda: Jacobi(block_size=0), "block_size"),
        (lambda: Jacobi(num_recycled=-1), "num_recycled must be at least 0"),
        (lambda: Jacobi(ngram_size=1), "ngram_size must be at least 2"),
        (lambda: Lookahead(window_size=0), "window_size"),
        (lambda: Lookahead(ngram_size=1), "ngram_size"),
        (lambda: Lookahead(num_guesses=0), "num_guesses"),
        (lambda: Combined([]), "at least one"),
        (lambda: Combined([SpanCopy()], max_draft_tokens=0), "max_draft_tokens"),
        (lambda: Combined([SpanCopy()], first_rest=0), "first_rest"),
        (lambda: Combined([SpanCopy()], token_cost=-1), "token_cost"),
    ],
)
def test_parameters_out_of_range_are_named(make: Callable[[], Drafter], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
