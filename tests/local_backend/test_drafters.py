"""Drafters against made-up models: functions from a text to its next token, so any guess can be judged."""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_backend import Combined, Draft, Drafter, Jacobi, Lookahead, Outcome, SpanCopy
from local_backend.drafters import WritingRow, drafter_of
from local_backend.drafters.ngram_pool import NgramPool
from local_backend.drafters.per_row import PerRow
from local_backend.verification import verify
from local_backend.width_costs import WidthCosts

NAMES = ("autoregressive", "combined", "jacobi", "lookahead", "reference_copy")

NextToken = Callable[[Sequence[int]], int]


@dataclass(eq=False)
class FakeRow:
    """A row as drafters see it."""

    token_ids: list[int]
    max_length: int = 100
    references: tuple[tuple[int, ...], ...] = ()
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def room(self) -> int:
        return self.max_length - len(self.token_ids)


def certain(token: int) -> list[tuple[int, float]]:
    """That a model takes nothing else for likely."""
    return [(token, 1.0)]


def step(
    drafter: Drafter,
    row: FakeRow,
    model: NextToken,
    *,
    max_draft_tokens: int = 1000,
    candidates_of: Callable[[int], Sequence[tuple[int, float]]] = certain,
) -> Outcome:
    """One forward of ``model``: what the engine does for a row."""
    (proposed,) = drafter.propose([row])
    draft = proposed.truncated(max_tokens=max_draft_tokens, max_depth=row.room - 1)
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    predictions = [model([*row.token_ids, *path]) for path in paths]
    candidates = [candidates_of(token) for token in predictions] if draft.num_candidates else ()
    outcome = verify(draft, lambda place: predictions[place + 1], predictions, candidates)
    row.token_ids.extend(outcome.token_ids)
    drafter.observe([row], [outcome])
    return outcome


def write(drafter: Drafter, row: FakeRow, model: NextToken, **options: int) -> int:
    """Fill the row; returns the forwards it took."""
    num_forwards = 0
    while row.room > 0:
        step(drafter, row, model, **options)
        num_forwards += 1
    return num_forwards


def by_last_two(text: Sequence[int]) -> int:
    """A text that depends on its last two tokens and takes long to repeat."""
    return (text[-1] * 31 + (text[-2] if len(text) > 1 else 0) * 17 + 5) % 101


def by_last(text: Sequence[int]) -> int:
    return (text[-1] * 5 + 3) % 97


def by_position(text: Sequence[int]) -> int:
    """The easiest case for Jacobi iteration: a wrong guess spoils nothing behind it."""
    return (len(text) * len(text) * 7) % 89


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
        write(drafter_of(name), row, by_last_two, max_draft_tokens=max_draft_tokens)
        assert row.token_ids == want


@pytest.mark.parametrize("guesses", [(), (7, 8, 9)])
@pytest.mark.parametrize("name", NAMES)
def test_no_draft_is_deeper_than_the_row_has_room_for(name: str, guesses: tuple[int, ...]) -> None:
    drafter = drafter_of(name, guesses)
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


GUESSES = (901, 902, 903)


def trained_with_guesses(text: Sequence[int]) -> int:
    """Says on a guess token what stands so many places ahead of the token after its parent."""
    place = GUESSES.index(text[-1]) + 1 if text[-1] in GUESSES else 0
    text = [token for token in text if token not in GUESSES]
    for _ in range(place):
        text.append(by_last_two(text))
    return by_last_two(text)


def test_guess_tokens_land_as_many_places_as_there_are() -> None:
    drafter, row = Jacobi(guess_token_ids=GUESSES, num_recycled=0), FakeRow([1, 2], 42)
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
    drafter = Jacobi(2, 0, guess_token_ids=GUESSES, tree_size=8, least_probability=0.08)
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
    drafter = Jacobi(guess_token_ids=GUESSES, num_recycled=1, least_probability=0.9)
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


# Combined ------------------------------------------------------------------------------------------


class Guesses:
    """Always proposes what a function says."""

    def __init__(self, guess: Callable[[WritingRow], Sequence[int]]) -> None:
        self.guess = guess
        self.num_proposed = self.num_observed = 0

    def propose(self, rows: Sequence[WritingRow]) -> list[Draft]:
        self.num_proposed += len(rows)
        return [Draft.chain(self.guess(row)) for row in rows]

    def observe(self, rows: Sequence[WritingRow], outcomes: Sequence[Outcome]) -> None:
        self.num_observed += len(rows)


def right(row: WritingRow) -> list[int]:
    text = list(row.token_ids)
    for _ in range(6):
        text.append(by_last_two(text))
    return text[len(row.token_ids) :]


def wrong(_: WritingRow) -> list[int]:
    return [777] * 6


def test_combined_finds_the_member_that_gains_and_rests_the_other() -> None:
    good, bad = Guesses(right), Guesses(wrong)
    drafter, row = Combined([bad, good], max_draft_tokens=6), FakeRow([1, 2], 702)
    num_drafted_wrong = 0
    num_forwards = 0
    while row.room > 0:
        num_drafted_wrong += 777 in step(drafter, row, by_last_two).draft.token_ids
        num_forwards += 1
    assert num_forwards <= 700 / 7 + 20
    assert num_drafted_wrong <= num_forwards / 8
    assert good.num_observed == good.num_proposed == num_forwards
    assert bad.num_observed == bad.num_proposed <= num_forwards / 4


def test_combined_merges_members_that_are_right_at_different_times() -> None:
    odd = Guesses(lambda row: right(row) if len(row.token_ids) % 2 else wrong(row))
    even = Guesses(lambda row: wrong(row) if len(row.token_ids) % 2 else right(row))
    row = FakeRow([1, 2], 402)
    assert write(Combined([odd, even], max_draft_tokens=12), row, by_last_two) <= 400 / 6


def test_combined_does_not_judge_by_tokens_that_only_ask_the_model() -> None:
    """Guess tokens for which forwards have no room gain nothing then, and everything when they have."""
    jacobi = Jacobi(guess_token_ids=GUESSES, num_recycled=0)
    drafter, row = Combined([Guesses(wrong), jacobi]), FakeRow([1, 2], 132)
    while row.room > 100:
        step(drafter, row, trained_with_guesses, max_draft_tokens=0)
    assert write(drafter, row, trained_with_guesses) <= 100 / (1 + len(GUESSES)) * 1.25


def test_combined_drafts_nothing_where_nothing_is_gained() -> None:
    drafter, row = Combined([Guesses(wrong)]), FakeRow([1, 2], 302)
    sizes = []
    while row.room > 0:
        sizes.append(len(step(drafter, row, by_last_two).draft))
    assert sum(map(bool, sizes[100:-10])) <= 190 / 7


def test_combined_keeps_to_its_budget() -> None:
    drafter, row = Combined([Guesses(wrong), Guesses(right)], max_draft_tokens=8), FakeRow([1, 2], 102)
    while row.room > 0:
        assert len(step(drafter, row, by_last_two).draft) <= 8


# Trees ---------------------------------------------------------------------------------------------


@given(paths=st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6), max_tokens=st.integers(0, 20))
def test_merged_drafts_hold_every_path_once(paths: list[list[int]], max_tokens: int) -> None:
    merged = Draft.merged(map(Draft.chain, paths))
    assert len(merged) == len({tuple(path[: n + 1]) for path in paths for n in range(len(path))})
    for path in paths:
        assert len(merged.places_along(path)) == len(path)
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
