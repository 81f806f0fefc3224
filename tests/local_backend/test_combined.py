"""Several drafters at once, against made-up models: who is drafted, who rests, and who asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from local_backend import Combined, Draft, GuessTokens, Outcome
from local_backend.drafters import WritingRow

from .fake_rows import GUESSES, FakeRow, by_last_two, step, trained_with_guesses, write


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


def test_combined_does_not_judge_by_tokens_that_only_ask_the_model() -> None:
    """Guess tokens for which forwards have no room gain nothing then, and everything when they have."""
    guess_tokens = GuessTokens(GUESSES, num_recycled=0)
    drafter, row = Combined([Guesses(wrong), guess_tokens]), FakeRow([1, 2], 132)
    while row.room > 100:
        step(drafter, row, trained_with_guesses, max_draft_tokens=0)
    assert write(drafter, row, trained_with_guesses) <= 100 / (1 + len(GUESSES)) * 1.25


class EveryOtherTime:
    """Proposes the next three tokens, and says that they are likely, or nothing."""

    def __init__(self) -> None:
        self.num_asked = 0

    def propose(self, rows: Sequence[WritingRow]) -> list[Draft]:
        self.num_asked += 1
        if self.num_asked % 2 == 0:
            return [Draft()] * len(rows)
        return [replace(Draft.chain(right(row)[:3]), probabilities=(0.9, 0.85, 0.8)) for row in rows]

    def observe(self, rows: Sequence[WritingRow], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""


def test_combined_asks_where_the_guesses_of_all_members_end() -> None:
    """The other's tokens, and what guess tokens hung behind the last of them stand for, land in turns."""
    drafter, row = Combined([EveryOtherTime(), GuessTokens(GUESSES, num_recycled=0)]), FakeRow([1, 2], 202)
    outcome = step(drafter, row, trained_with_guesses)
    assert outcome.draft.token_ids[:3] == tuple(right(FakeRow([1, 2]))[:3])
    assert {2} == {outcome.draft.parents[place] for place in outcome.open_questions.values()}
    assert write(drafter, row, trained_with_guesses) <= 196 / 4 + 1


def test_combined_asks_behind_nothing_that_a_member_only_supposes() -> None:
    """What a member proposes that does not say how likely it is counts as certain and is not: see Jacobi."""
    drafter, row = Combined([Guesses(wrong), GuessTokens(GUESSES, num_recycled=0)]), FakeRow([1, 2], 202)
    while row.room > 0:
        draft = step(drafter, row, trained_with_guesses).draft
        supposed = {place for place, token in enumerate(draft.token_ids) if token == 777}
        assert supposed.isdisjoint(
            parent for token, parent in zip(draft.token_ids, draft.parents, strict=True) if token in GUESSES
        )
