"""Several drafters at once, against made-up models: who is drafted and who rests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from local_backend import Combined, Draft, Outcome
from local_backend.drafting import RowView
from tests.local_backend.drafting.fake_rows import FakeRow, by_last_two, step, write


class Guesses:
    """Always proposes what a function says."""

    def __init__(self, guess: Callable[[RowView], Sequence[int]]) -> None:
        self.guess = guess
        self.num_proposed = self.num_observed = 0

    def propose(self, rows: Sequence[RowView]) -> list[Draft]:
        self.num_proposed += len(rows)
        return [Draft.chain(self.guess(row)) for row in rows]

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        self.num_observed += len(rows)


def right(row: RowView) -> list[int]:
    text = list(row.token_ids)
    for _ in range(6):
        text.append(by_last_two(text))
    return text[len(row.token_ids) :]


def wrong(_: RowView) -> list[int]:
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
