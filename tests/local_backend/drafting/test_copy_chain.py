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
    """A row that has just written the six tokens of the document before ``place``."""
    row = FakeRow([7, 8], references=(DOCUMENT,))
    row.token_ids += DOCUMENT[place - 6 : place]
    return row


def test_what_is_accepted_is_drafted_further_in_every_row() -> None:
    drafter = CopyChain(max_draft_tokens=30, min_probability=0.1)

    def emit(row: FakeRow, token: int) -> None:
        drafter.propose([row])
        row.token_ids.append(token)
        drafter.observe([row], [Outcome((), (token,))])

    def drafted() -> int:
        return len(drafter.propose([quoting(10)])[0])

    first = drafted()
    for place in range(6, 45):  # each time, the model goes on in words of its own
        emit(quoting(place), 9)
    refused = drafted()
    assert refused < first
    for start in range(6, 43, 4):
        row = quoting(start)
        for token in DOCUMENT[start : start + 8]:
            emit(row, token)
    assert drafted() > refused


def test_the_shorter_a_match_and_the_dearer_a_token_the_shorter_the_draft() -> None:
    def length(num_matching: int, least: float) -> int:
        row = FakeRow([7, 8], references=(DOCUMENT,))
        row.token_ids += DOCUMENT[10 : 10 + num_matching]
        (draft,) = CopyChain(max_draft_tokens=40, min_probability=least).propose([row])
        return len(draft)

    for least in (0.05, 0.1, 0.3):
        lengths = [length(num_matching, least) for num_matching in (1, 2, 4, 8)]
        assert all(0 < each <= 1 + n / (2 * least) for n, each in zip((1, 2, 4, 8), lengths, strict=True))
        assert lengths[0] < lengths[-1]
    assert length(4, 0.05) > length(4, 0.1) > length(4, 0.3)


def test_earlier_answers_are_copied_beside_the_prompt() -> None:
    drafter = CopyChain(max_draft_tokens=8, min_probability=0.1)
    before = FakeRow([7, *DOCUMENT[:5], 8])
    before.token_ids += DOCUMENT[20:24]
    assert DOCUMENT[24] not in drafter.propose([before])[0].token_ids
    drafter.earlier = (DOCUMENT[15:40],)
    after = FakeRow([7, *DOCUMENT[:5], 8])
    after.token_ids += DOCUMENT[20:24]
    assert drafter.propose([after])[0].token_ids[:3] == DOCUMENT[24:27]
    # And what the prompt holds.
    assert drafter.propose([FakeRow([*DOCUMENT[:5], 9, *DOCUMENT[1:4]])])[0].token_ids[:1] == DOCUMENT[4:5]


def test_a_chain_has_room_for_a_token() -> None:
    with pytest.raises(ValueError, match="max_draft_tokens"):
        CopyChain(max_draft_tokens=0)
