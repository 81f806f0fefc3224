"""The likeliest copy as a chain, and how it learns what a model accepts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local_backend.drafting.copy_chain import CopyChain
from local_backend.drafting.draft import Outcome
from tests.local_backend.drafting.fake_rows import FakeRow

DOCUMENT = tuple(range(100, 160))


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.floats(0.02, 0.9))
def test_a_draft_is_a_chain_of_likely_tokens(rng: random.Random, size: int, least: float) -> None:
    reference = tuple(rng.randrange(6) for _ in range(60))
    row = FakeRow([rng.randrange(6) for _ in range(20)], max_length=39, references=(reference,))
    row.token_ids += [rng.randrange(6) for _ in range(10)]
    (draft,) = CopyChain(max_draft_tokens=size, min_probability=least).propose([row])
    assert draft.is_chain
    assert len(draft) <= min(size, 8)
    assert list(draft.probabilities) == sorted(draft.probabilities, reverse=True)
    assert all(least <= probability <= 1 for probability in draft.probabilities)
    assert set(draft.token_ids) <= {*reference, *row.token_ids}


def quoting(place: int) -> FakeRow:
    """A row that has just written the three tokens of the document before ``place``."""
    row = FakeRow([7, 8], references=(DOCUMENT,))
    row.token_ids += DOCUMENT[place - 3 : place]
    return row


def test_what_is_accepted_is_drafted_further_in_every_row() -> None:
    drafter = CopyChain(max_draft_tokens=30, min_probability=0.3)

    def emit(row: FakeRow, token: int) -> None:
        drafter.propose([row])
        row.token_ids.append(token)
        drafter.observe([row], [Outcome((), (token,))])

    before = len(drafter.propose([quoting(10)])[0])
    for start in range(3, 43, 4):
        row = quoting(start)
        for token in DOCUMENT[start : start + 8]:
            emit(row, token)
    after = len(drafter.propose([quoting(10)])[0])
    assert after > before
    for place in range(5, 45):  # each time, the model goes on in words of its own
        emit(quoting(place), 9)
    assert len(drafter.propose([quoting(10)])[0]) < after


def test_a_chain_has_room_for_a_token() -> None:
    with pytest.raises(ValueError, match="max_draft_tokens"):
        CopyChain(max_draft_tokens=0)
