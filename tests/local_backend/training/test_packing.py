"""Packing and streams: who sees whom, few widths, and blocks that go on as Jacobi decoding does."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from local_backend.training import NoiseOptions
from local_backend.training.packing import Copies, Text, Texts, one_thread, pack
from local_backend.training.streams import Streams

token = st.integers(1, 50)
tokens = st.lists(token, min_size=1, max_size=40)
texts = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=9)


@given(texts, st.integers(0, 3), st.integers(1, 6), st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_each_column_sees_what_stands_before_it(
    rows: list[Text], num_blocks: int, block: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    laid_out = Texts.of(rows)
    assert len({group.width for group in laid_out.groups}) == len(laid_out.groups) <= 4
    assert [number for group in laid_out.groups for number in range(group.first, group.stop)] == list(
        range(len(rows))
    )
    in_order = sorted(rows, key=lambda text: len(text[0]) + len(text[1]))
    places = [token for _, answer in in_order for token in answer]
    for group in laid_out.groups:
        some = torch.arange(group.first, group.stop)
        length = laid_out.num_answer[some, None]
        starts = (torch.rand(len(some), num_blocks, generator=random) * length).long()
        guesses = torch.randint(1, 50, (len(some), num_blocks, block), generator=random)
        batch = pack(laid_out, some, group, Copies(starts, guesses), clean_weight=2.0)
        assert batch.weights[:, : group.num_answer].sum() == pytest.approx(2.0, rel=1e-4)
        assert batch.weights[:, group.num_answer :].sum() in (0.0, pytest.approx(1.0, rel=1e-4))
        for row, number in enumerate(some.tolist()):
            prompt, answer = in_order[number]
            clean = [*prompt, *answer]
            for column, place, weight in zip(
                batch.columns[row].tolist(),
                batch.places[row].tolist(),
                batch.weights[row].tolist(),
                strict=True,
            ):
                if not weight:
                    continue
                seen = batch.sees[row, column].nonzero().flatten().tolist()
                # What is seen reads, by position, as one text up to the column's own position.
                position = int(batch.position_ids[row, column])
                assert batch.position_ids[row, seen].tolist() == list(range(position + 1))
                assert places[place] == clean[position + 1]
                if column < group.width:
                    assert seen == list(range(column + 1))
                    assert batch.input_ids[row, seen].tolist() == clean[: column + 1]
                else:
                    first = group.width + (column - group.width) // block * block
                    begin = len(prompt) + int(starts[row, (column - group.width) // block])
                    assert seen == [*range(begin), *range(first, column + 1)]


def test_nothing_to_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to pack"):
        Texts.of([])
    with pytest.raises(ValueError, match="no prompt or no answer"):
        Texts.of([([], [1])])
    with pytest.raises(ValueError, match="drawn_share must be between 0 and 1"):
        NoiseOptions(drawn_share=1.5)
    with pytest.raises(ValueError, match="block_size"):
        NoiseOptions(block_size=0)


def _next_block(text: Text, start: int, guess: list[int], predicted: list[int]) -> tuple[int, list[int]]:
    """One iteration of Jacobi decoding in plain Python: where the next block starts, and its guesses."""
    prompt, answer = list(text[0]), list(text[1])
    agreed = 0
    while agreed < len(guess) and answer[start + agreed : start + agreed + 1] == [guess[agreed]]:
        agreed += 1
    kept, behind = predicted[agreed:], predicted[-1]
    emitted = [*prompt, *answer][: len(prompt) + min(start + agreed + 1, len(answer) - 1)]
    found = [at for at, each in enumerate(emitted[:-1]) if each == behind]
    if not found:
        return agreed + 1, [*kept, *[behind] * agreed]
    follows = range(found[-1] + 1, found[-1] + 1 + len(guess))
    return agreed + 1, [*kept, *(emitted[min(at, len(emitted) - 1)] for at in follows)][: len(guess)]


@given(texts, st.floats(0, 1), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_blocks_go_on_as_in_jacobi_decoding(rows: list[Text], drawn_share: float, seed: int) -> None:
    laid_out = Texts.of(rows)
    streams = Streams(laid_out, NoiseOptions(5, 3, drawn_share))
    random = torch.Generator().manual_seed(seed)
    every = torch.arange(len(rows))
    in_order = sorted(rows, key=lambda text: len(text[0]) + len(text[1]))
    for _ in range(4):
        copies = streams.copies(every, random)
        predicted = torch.randint(1, 9, copies.guesses.shape, generator=random)
        emitted = streams.advance(every, copies, predicted, random)
        for row, text in enumerate(in_order):
            for number in range(3):
                start = int(copies.starts[row, number])
                assert start < len(text[1])
                count, guess = _next_block(
                    text, start, copies.guesses[row, number].tolist(), predicted[row, number].tolist()
                )
                assert emitted[row, number] == count
                assert streams.state["starts"][row, number] == start + count
                assert streams.state["guesses"][row, number].tolist() == guess
                if start + count >= len(text[1]) - 1:
                    assert streams.state["is_over"][row, number]


def test_blocks_begin_with_what_the_text_said_before() -> None:
    laid_out = Texts.of([([4, 5, 6, 7, 4], [9, 8, 2])])
    copies = Streams(laid_out, NoiseOptions(3, 64, drawn_share=0.0)).copies(
        torch.tensor([0]), torch.Generator().manual_seed(0)
    )
    blocks = {
        (start, *guess)
        for start, guess in zip(copies.starts[0].tolist(), copies.guesses[0].tolist(), strict=True)
    }
    assert blocks == {(0, 5, 6, 7), (1, 9, 9, 9)}


@pytest.mark.slow  # times work beside a process that keeps the other core busy
def test_thirty_two_examples_are_packed_in_a_moment_beside_a_busy_process() -> None:
    laid_out = Texts.of([([3] * 118, [5] * 42) for _ in range(64)])
    streams, random = Streams(laid_out, NoiseOptions()), torch.Generator().manual_seed(0)
    seconds = []
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            for _ in range(40):
                started = time.perf_counter()
                with one_thread():
                    rows = torch.randperm(64, generator=random)[:32]
                    copies = streams.copies(rows, random)
                    pack(laid_out, rows, laid_out.groups[0], copies)
                    streams.advance(rows, copies, copies.guesses, random)
                seconds.append(time.perf_counter() - started)
        finally:
            busy.kill()
    assert sorted(seconds)[20] < 0.025
