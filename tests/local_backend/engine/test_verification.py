"""Drafts, verification and sampling, as pure functions."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from local_backend import Draft, SamplingParams
from local_backend.engine.verification import verify
from local_backend.sequences.sampling import probabilities, sample


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    size = draw(st.integers(0, 12))
    parents = tuple(draw(st.integers(-1, place - 1)) for place in range(size))
    return Draft(tuple(draw(st.integers(0, 3)) for _ in range(size)), parents)


@given(draft=drafts(), text=st.lists(st.integers(0, 3), min_size=14, max_size=14))
def test_what_is_emitted_is_the_models_own_text(draft: Draft, text: list[int]) -> None:
    depths = {-1: 0, **dict(enumerate(draft.depths()))}
    outcome = verify(draft, lambda place: text[depths[place]])
    assert list(outcome.token_ids) == text[: len(outcome.token_ids)]
    assert len(outcome.token_ids) == len(outcome.accepted) + 1
    place = -1
    for child in outcome.accepted:
        assert draft.parents[child] == place
        place = child
    deeper = {draft.token_ids[c] for c, parent in enumerate(draft.parents) if parent == place}
    assert outcome.token_ids[-1] not in deeper


@given(draft=drafts(), max_tokens=st.integers(0, 12), max_depth=st.integers(0, 6))
def test_a_truncated_draft_is_a_part_of_it(draft: Draft, max_tokens: int, max_depth: int) -> None:
    part = draft.truncated(max_tokens=max_tokens, max_depth=max_depth)
    assert len(part) <= max_tokens
    assert all(depth <= max_depth for depth in part.depths())
    assert _paths(part) <= _paths(draft)


@given(draft=drafts(), size=st.integers(1, 4))
def test_a_draft_is_cut_to_what_the_model_can_read(draft: Draft, size: int) -> None:
    part = draft.within_vocabulary(size)
    assert all(token < size for token in part.token_ids)
    assert _paths(part) == {path for path in _paths(draft) if all(token < size for token in path)}


@given(draft=drafts(), ends=st.frozensets(st.integers(0, 3)))
def test_a_draft_is_cut_behind_what_ends_the_text(draft: Draft, ends: frozenset[int]) -> None:
    part = draft.ending_with(ends)
    assert _paths(part) == {path for path in _paths(draft) if not any(token in ends for token in path[:-1])}


def _paths(draft: Draft) -> set[tuple[int, ...]]:
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for place, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        paths[place] = (*paths[parent], token)
    return set(paths.values())


def test_malformed_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="stand before its child"):
        Draft((1, 2), (0, -1))
    with pytest.raises(ValueError, match="1 tokens but 2 parents"):
        Draft((1,), (-1, 0))


def test_sampling_through_drafts_has_the_models_distribution() -> None:
    """Chi-square over 1,500 draws of two tokens; right code would fail one seed in 10,000 (p = 1e-4)."""
    vocabulary, draws = 4, 1_500
    params = SamplingParams(temperature=0.7, top_k=3)
    logits = torch.randn(1 + vocabulary, vocabulary, generator=torch.Generator().manual_seed(1))
    rng = random.Random(2)
    counts = torch.zeros(vocabulary, vocabulary)

    def draw(row: int) -> int:
        return int(sample(logits[row : row + 1].clone(), [params], [rng.random()]))

    for _ in range(draws):
        children = rng.sample(range(vocabulary), rng.randrange(0, 3))
        draft = Draft(tuple(children), (-1,) * len(children))

        def choose(place: int, draft: Draft = draft) -> int:
            row = 0 if place < 0 else 1 + draft.token_ids[place]
            return draw(row)

        token_ids = list(verify(draft, choose).token_ids)
        if len(token_ids) == 1:  # the next forward
            token_ids.append(draw(1 + token_ids[0]))
        counts[token_ids[0], token_ids[1]] += 1
    first = probabilities(logits[0], params)
    expected = (
        draws
        * first[:, None]
        * torch.stack([probabilities(logits[1 + token], params) for token in range(vocabulary)])
    )
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert possible.sum() == 9
    assert statistic < 31.83  # 8 degrees of freedom, p = 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -1}, "temperature must be 0"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_k": -2}, "top_k must be 0"),
        ({"stop": "word"}, "stop must be a tuple"),
    ],
)
def test_parameters_out_of_range_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**changes)  # type: ignore[arg-type]  # the mistake under test


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = probabilities(logits, SamplingParams(temperature=1.0, top_p=0.6))
    torch.testing.assert_close(kept, torch.tensor([0.625, 0.375, 0.0, 0.0]))
