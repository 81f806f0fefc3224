"""Guess tokens against made-up models that were trained with them, or not."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_backend import Draft, GuessTokens
from local_backend.drafters import drafter_of
from local_backend.width_costs import WidthCosts

from .fake_rows import GUESSES, FakeRow, by_last_two, step, trained_with_guesses, write


def test_guess_tokens_land_as_many_places_as_there_are() -> None:
    drafter, row = GuessTokens(GUESSES, num_recycled=0), FakeRow([1, 2], 42)
    assert len(step(drafter, row, trained_with_guesses).token_ids) == 1
    while row.room > 4:
        outcome = step(drafter, row, trained_with_guesses)
        assert len(outcome.token_ids) == 1 + len(GUESSES)
        # The model is sure of the whole chain, so only behind its end is there anything to ask.
        assert outcome.draft.parents == (-1, 0, 1, 2, 2, 2)
    want = [1, 2]
    while len(want) < len(row.token_ids):
        want.append(by_last_two(want))
    assert row.token_ids == want


def in_doubt(token: int) -> list[tuple[int, float]]:
    """That a model takes another token for likelier, on guess tokens; what it says elsewhere is not asked."""
    return [(token + 1000, 0.5), (token, 0.4), (token + 2000, 0.05)]


def test_a_tree_lands_what_is_second_in_likelihood() -> None:
    drafter = GuessTokens(GUESSES, num_asked=2, num_recycled=0, tree_size=8, least_probability=0.08)
    row = FakeRow([1, 2], 42)
    step(drafter, row, trained_with_guesses, candidates_of=in_doubt)
    while row.room > 4:
        (draft,) = drafter.propose([row])
        (again,) = drafter.propose([row])
        assert draft == again
        # Two at the first depth, below each the two whose path is likely enough, and questions behind these;
        # behind the root, too, as soon as answers have shown what they are worth.
        assert draft.parents[:6] == (-1, -1, 0, 0, 1, 1)
        assert {2, 3, 4, 5} <= set(draft.parents[6:]) <= {-1, 2, 3, 4, 5}
        assert set(draft.token_ids[6:]) == set(GUESSES[:2])
        outcome = step(drafter, row, trained_with_guesses, candidates_of=in_doubt)
        assert len(outcome.token_ids) == 3
    want = [1, 2]
    while len(want) < len(row.token_ids):
        want.append(by_last_two(want))
    assert row.token_ids == want


def test_each_row_learns_what_its_ngrams_are_worth() -> None:
    costs = WidthCosts((1,), (1,), (1, 2), (((1.0, 1.35),),))
    drafter = GuessTokens(GUESSES, num_recycled=1, least_probability=0.9)
    said = random.Random(4).choices(range(3), k=100)
    quoting, writing = FakeRow([1, 2, 3, 4, 1, 2, 3], 150), FakeRow([0, 1, 2, 0, 2, 1, 0], 150)
    for _ in range(20):
        step(drafter, quoting, lambda text: text[-4])
        step(drafter, writing, lambda text: said[len(text)])
    assert costs.best_width(drafter.propose([quoting]), context=1) >= 3
    assert costs.best_width(drafter.propose([writing]), context=1) == 0


CANDIDATES = st.lists(
    st.lists(st.floats(0.01, 1), min_size=1, max_size=4).map(
        lambda shares: [(n, share / (sum(shares) + 0.1)) for n, share in enumerate(sorted(shares)[::-1])]
    ),
    max_size=5,
)


@given(CANDIDATES, st.integers(1, 12), st.floats(0, 0.5))
def test_the_likeliest_paths_are_those_of_all_paths(
    candidates: list[list[tuple[int, float]]], max_tokens: int, least_probability: float
) -> None:
    draft = Draft.likeliest_paths(candidates, max_tokens=max_tokens, least_probability=least_probability)
    every = []
    for depth in range(1, len(candidates) + 1):
        for path in itertools.product(*candidates[:depth]):
            probability = math.prod(share for _, share in path)
            if probability >= least_probability:
                every.append(probability)
    assert list(draft.probabilities) == pytest.approx(sorted(every)[::-1][:max_tokens])
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    assert len(set(paths)) == len(paths)
    for path, probability in zip(paths[1:], draft.probabilities, strict=True):
        assert probability == pytest.approx(
            math.prod(candidates[n][token][1] for n, token in enumerate(path))
        )


@given(CANDIDATES, st.floats(0.01, 0.3), st.integers(0, 40))
def test_questions_hang_from_where_the_accepted_path_may_end(
    candidates: list[list[tuple[int, float]]], least_worth: float, width: int
) -> None:
    tree = Draft.likeliest_paths(candidates, max_tokens=12, least_probability=0.02)
    worths = [0.8, 0.6, 0.5]
    draft = tree.with_questions(GUESSES, worths, max_depth=4, least_worth=least_worth)
    assert (draft.token_ids[: len(tree)], draft.parents[: len(tree)]) == (tree.token_ids, tree.parents)
    depths = [0, *tree.depths()]
    asked = set(zip(draft.parents[len(tree) :], draft.token_ids[len(tree) :], strict=True))
    for place in range(-1, len(tree)):
        reached = tree.probabilities[place] if place >= 0 else 1.0
        goes_on = sum(tree.probabilities[child] for child in range(len(tree)) if tree.parents[child] == place)
        for question, worth in zip(GUESSES, worths, strict=True):
            whole = (reached - goes_on) * worth
            if whole == pytest.approx(least_worth):
                continue
            assert ((place, question) in asked) == (whole > least_worth and depths[place + 1] < 4)
    # However narrow a forward, it asks nothing behind a token that it does not hold.
    part = draft.likeliest(width)
    assert len(part) == min(width, len(draft))


def test_where_to_ask_cannot_be_told_without_probabilities() -> None:
    with pytest.raises(ValueError, match="no probabilities"):
        Draft.chain([1, 2]).with_questions(GUESSES, [0.5] * 3, max_depth=4, least_worth=0.1)


@pytest.mark.parametrize("max_draft_tokens", [1000, 7, 2])
@pytest.mark.parametrize("name", ["jacobi", "combined"])
def test_guess_tokens_of_a_model_that_does_not_know_them_change_nothing(
    name: str, max_draft_tokens: int
) -> None:
    row, want = FakeRow([1, 2], 60), [1, 2]
    while len(want) < 60:
        want.append(by_last_two(want))
    write(drafter_of(name, GUESSES), row, by_last_two, max_draft_tokens=max_draft_tokens)
    assert row.token_ids == want
