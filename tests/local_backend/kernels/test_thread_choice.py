"""Fewer threads compute while another process keeps a core busy, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from local_backend.kernels.openmp import ThreadChoice, set_num_threads


class Machine:
    """Two cores on which a forward takes a second on two threads, or 1.6 on one; 15 on two if one is busy."""

    def __init__(self) -> None:
        self.now, self.is_busy, self.threads = 0.0, False, list[int]()

    def forward(self) -> int:
        self.threads.append(torch.get_num_threads())
        fast = 15.0 if self.is_busy else 1.0
        self.now += 1.6 if self.threads[-1] == 1 else fast
        return len(self.threads)

    def run(self, choice: ThreadChoice, count: int) -> list[int]:
        """The threads of some forwards."""
        before = len(self.threads)
        for number in range(before, before + count):
            assert choice.run("kind", self.forward) == number + 1
        return self.threads[before:]


@pytest.fixture
def machine() -> Iterator[Machine]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Machine()
    torch.set_num_threads(before)


def test_a_busy_core_is_noticed_and_left_alone_until_it_is_free(machine: Machine) -> None:
    choice = ThreadChoice(2, lambda: machine.now)
    quiet = machine.run(choice, 400)
    assert quiet.count(1) == 1  # one early try
    machine.is_busy = True
    busy = machine.run(choice, 400)
    assert busy[:4] == [2, 2, 2, 1]
    assert busy.count(2) <= 6
    machine.is_busy = False
    free = machine.run(choice, 1_200)
    assert free[-1] == 2
    assert free.count(1) < 1_000


def test_a_core_that_is_busy_from_the_start_is_noticed(machine: Machine) -> None:
    machine.is_busy = True
    choice = ThreadChoice(2, lambda: machine.now)
    assert machine.run(choice, 200).count(2) <= 6


def test_other_threads_compute_on_as_many_threads_as_before() -> None:
    before = torch.get_num_threads()

    def compute_on_one() -> int:
        set_num_threads(1)
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(compute_on_one).result() == 1
    assert torch.get_num_threads() == before


def test_a_forward_that_was_disturbed_changes_nothing(machine: Machine) -> None:
    choice = ThreadChoice(2, lambda: machine.now)
    for _ in range(60):
        machine.run(choice, 9)
        machine.is_busy = True
        assert machine.run(choice, 1) == [2]
        machine.is_busy = False
    assert machine.threads.count(1) == 1


def test_one_thread_stays_one(machine: Machine) -> None:
    torch.set_num_threads(1)
    choice = ThreadChoice(1, lambda: machine.now)
    assert set(machine.run(choice, 300)) == {1}
