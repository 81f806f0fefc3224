"""Packing and noise: who sees whom, where things stand, and how wrong a copy may be."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from local_backend.training import NoiseOptions, Trajectory
from local_backend.training.examples import (
    NoisyExamples,
    drawn_copies,
    noised,
    progressive_ratio,
    stored_copies,
    wrong_share,
)
from local_backend.training.losses import IGNORED, NO_TEACHER
from local_backend.training.packing import Copy, Example, num_packed_tokens, pack

token = st.integers(1, 50)
tokens = st.lists(token, min_size=1, max_size=12).map(tuple)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    answer = draw(st.lists(token, max_size=12).map(tuple))
    copies = draw(
        st.lists(
            st.builds(Copy, st.integers(0, len(answer)), st.lists(token, max_size=9).map(tuple)), max_size=4
        )
    )
    return Example(draw(tokens), answer, tuple(copies))


@given(st.lists(examples(), min_size=1, max_size=3))
@settings(max_examples=80, deadline=None)
def test_each_column_sees_what_stood_before_it(rows: list[Example]) -> None:
    batch = pack(rows, pad_id=0)
    assert batch.input_ids.shape[1] == max(map(num_packed_tokens, rows))
    for row, example in enumerate(rows):
        clean = [*example.prompt_ids, *example.answer_ids]
        for column in range(num_packed_tokens(example)):
            seen = batch.sees[row, column].nonzero().flatten().tolist()
            # What is seen reads, by position, as one text up to the column's own position.
            positions = batch.position_ids[row, seen].tolist()
            assert sorted(positions) == list(range(int(batch.position_ids[row, column]) + 1))
            teacher = int(batch.fixed_point_column[row, column])
            if column < len(clean):
                assert teacher == NO_TEACHER
                assert seen == list(range(column + 1))
            else:
                assert teacher == int(batch.position_ids[row, column]) < len(clean) - 1
                assert int(batch.labels[row, column]) == IGNORED
        for column, label in enumerate(batch.labels[row].tolist()):
            first = len(example.prompt_ids) - 1
            assert label == (clean[column + 1] if first <= column < len(clean) - 1 else IGNORED)
        for column in range(num_packed_tokens(example), batch.input_ids.shape[1]):
            assert batch.sees[row, :, column].sum() == 1  # padding is seen by itself alone


def test_nothing_to_pack_and_misplaced_copies_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to pack"):
        pack([])
    with pytest.raises(ValueError, match="prompt is empty"):
        Example((), (1,))
    with pytest.raises(ValueError, match="starts at token 3"):
        Example((1,), (1, 2), (Copy(3, (1,)),))
    with pytest.raises(ValueError, match="followed by copy 1"):
        Example((1,), (1, 2), (Copy(0, (1,), next_copy=1),))


@given(
    st.lists(token, min_size=2, max_size=40),
    st.floats(0, 1),
    st.integers(0, 39),
    st.integers(1, 20),
    st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_noise_spoils_no_more_than_its_share(
    answer: list[int], ratio: float, start: int, length: int, seed: int
) -> None:
    start = min(start, len(answer))
    guess = noised(answer, range(start, start + length), ratio, [60, 61], random.Random(seed))
    right = answer[start : start + length]
    assert len(guess) == len(right)
    num_right = round(len(right) * (1 - ratio))
    assert guess[:num_right] == right[:num_right]
    assert wrong_share(Copy(start, tuple(guess)), answer) <= ratio + 0.5 / max(1, len(right)) + 1e-9


def test_noise_rises_along_the_window_and_begins_anew() -> None:
    options = NoiseOptions(window=4, lowest=0.25, highest=1.0)
    assert [progressive_ratio(block, options) for block in range(8)] == [0.25, 0.5, 0.75, 1.0] * 2
    assert progressive_ratio(5, NoiseOptions(window=1)) == 1.0


@given(st.integers(2, 60), st.integers(1, 20), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_drawn_copies_cover_every_place_in_every_pass(
    length: int, block_size: int, num_passes: int, seed: int
) -> None:
    options = NoiseOptions(block_size=block_size, num_passes=num_passes)
    copies = drawn_copies(Trajectory((1, 2), tuple(range(length))), options, random.Random(seed))
    covered = [0] * (length - 1)  # behind the last token nothing is predicted
    for copy in copies:
        assert len(copy.token_ids) <= block_size
        for place in range(copy.start, min(length - 1, copy.start + len(copy.token_ids))):
            covered[place] += 1
    assert covered == [num_passes] * (length - 1)


def _trajectory(num_iterates: int = 6) -> Trajectory:
    answer = tuple(range(20, 34))
    iterates = tuple(
        tuple(99 if i % (n + 1) else answer[n + i] for i in range(5)) for n in range(num_iterates)
    )
    return Trajectory((1, 2, 3), answer, tuple(range(num_iterates)), iterates)


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_stored_copies_are_iterates_and_their_successors(seed: int, with_next: bool) -> None:
    trajectory = _trajectory()
    options = NoiseOptions(block_size=5)
    copies = stored_copies(trajectory, options, random.Random(seed), with_next=with_next)
    known = list(zip(trajectory.starts, trajectory.iterates, strict=True))
    assert copies
    for copy in copies:
        number = known.index((copy.start, copy.token_ids))
        if copy.next_copy is not None:
            following = copies[copy.next_copy]
            assert (following.start, following.token_ids) == known[number + 1]
    assert any(copy.next_copy is not None for copy in copies) or not with_next or len(copies) == 1
    Example(trajectory.prompt_ids, trajectory.answer_ids, tuple(copies))


def test_examples_depend_on_their_number_alone() -> None:
    trajectories = [Trajectory((1,) * n, tuple(range(2, 12)), (0, 2), ((3, 3), (4, 5))) for n in range(1, 30)]
    one, other = (NoisyExamples(trajectories, 200, 4, noise=NoiseOptions(), seed=3) for _ in range(2))
    assert len(one) == 200
    assert [one[number] for number in reversed(range(200))] == [
        other[number] for number in range(199, -1, -1)
    ]
    assert len({one[number].copies for number in range(200)}) > 100  # noise is redrawn
    every = [len(one[number].prompt_ids) for number in range(200)]
    assert set(every) == set(range(1, 30))
    for at in range(0, 192, 4):  # rows of a batch are of like length
        assert max(every[at : at + 4]) - min(every[at : at + 4]) <= 29 // 4
    different = NoisyExamples(trajectories, 200, 4, noise=NoiseOptions(), seed=4)
    assert [different[n] for n in range(200)] != [one[n] for n in range(200)]


def test_examples_without_noise_are_clean() -> None:
    clean = NoisyExamples([_trajectory()], 5, 2, noise=None)
    assert not any(clean[number].copies for number in range(5))
    assert clean.mean_tokens() == _trajectory().num_tokens
    with pytest.raises(ValueError, match="nothing to train on"):
        NoisyExamples([], 5, 2, noise=None)


@pytest.mark.parametrize(
    "wrong", [{"block_size": 0}, {"window": 0}, {"lowest": 0.9, "highest": 0.5}, {"stored_share": 1.5}]
)
def test_noise_options_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(
        ValueError, match=next(iter(wrong)).split("_")[0] if "lowest" not in wrong else "rise"
    ):
        NoiseOptions(**wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_a_copy_that_is_right_costs_nothing() -> None:
    from local_backend.training.losses import consistency_loss
    from local_backend.training.packing import PackedForward
    from tests.local_backend.models.architectures import random_model

    model = random_model("llama", vocab_size=60)
    answer = (5, 9, 12, 30, 7)
    batch = pack([Example((1, 2), answer, (Copy(0, answer), Copy(2, answer[2:])))])
    with torch.no_grad():
        loss = consistency_loss(PackedForward(model)(model, batch), batch.fixed_point_column)
    assert loss.item() < 1e-6
