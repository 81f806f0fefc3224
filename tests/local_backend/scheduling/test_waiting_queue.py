"""Order of admission: by policy, no row twice, none left out, none overtaken for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_backend.scheduling.waiting_queue import AdmissionPolicy, WaitingQueue

POLICIES: tuple[AdmissionPolicy, ...] = ("first_come", "shortest_first", "longest_first")
LENGTHS: list[float | None] = [5, 9, None, 2, 9, 7]


def _waiting(policy: AdmissionPolicy, *, max_overtakes: int = 100) -> WaitingQueue[int]:
    waiting: WaitingQueue[int] = WaitingQueue(policy, max_overtakes=max_overtakes)
    for number, length in enumerate(LENGTHS):
        waiting.add(number, predicted_tokens=length, now=0.0)
    return waiting


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("first_come", [0, 1, 2, 3, 4, 5]),
        ("shortest_first", [2, 3, 0, 5, 1, 4]),
        ("longest_first", [2, 1, 4, 5, 0, 3]),
    ],
)
def test_the_policy_decides_and_ties_keep_their_order(policy: AdmissionPolicy, order: list[int]) -> None:
    waiting = _waiting(policy)
    assert list(waiting) == [0, 1, 2, 3, 4, 5]
    assert [waiting.pop().item for _ in LENGTHS] == order
    assert not waiting
    with pytest.raises(IndexError, match="the queue is empty"):
        waiting.pop()


def test_what_is_put_back_waits_where_it_was() -> None:
    waiting = _waiting("longest_first")
    first, second = waiting.pop(), waiting.pop()
    waiting.put_back(second)
    waiting.put_back(first)
    assert list(waiting) == [0, 1, 2, 3, 4, 5]
    assert [waiting.pop().item for _ in LENGTHS] == [2, 1, 4, 5, 0, 3]


def test_those_that_arrive_together_do_not_overtake_each_other() -> None:
    waiting = _waiting("longest_first", max_overtakes=0)
    waiting.add(6, predicted_tokens=100, now=1.0)
    # 2 begins first by the policy; then it would be 6, which came later.
    assert [waiting.pop().item for _ in range(7)] == [2, 0, 1, 3, 4, 5, 6]


def test_another_policy_orders_those_who_wait_anew() -> None:
    waiting = _waiting("first_come")
    first = waiting.pop()
    waiting.reorder("longest_first", max_overtakes=5)
    assert waiting.pop().item == 2
    waiting.put_back(first)
    assert [waiting.pop().item for _ in range(5)] == [1, 4, 5, 0, 3]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="no policy is named 'oldest'"):
        WaitingQueue("oldest")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ValueError, match="max_overtakes must be 0 or more, got -1"):
        WaitingQueue(max_overtakes=-1)
    waiting = _waiting("first_come")
    with pytest.raises(ValueError, match="3 waits already"):
        waiting.add(3, predicted_tokens=None, now=1.0)
    waiting.remove(3)
    with pytest.raises(KeyError):
        waiting.remove(3)


@given(
    policy=st.sampled_from(POLICIES),
    max_overtakes=st.integers(0, 6),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
            st.tuples(st.sampled_from(["pop", "pop", "put back", "cancel"]), st.just([])),
        ),
        max_size=60,
    ),
)
def test_everyone_begins_once_and_is_overtaken_by_few(
    policy: AdmissionPolicy, max_overtakes: int, steps: list[tuple[str, list[int]]]
) -> None:
    waiting: WaitingQueue[int] = WaitingQueue(policy, max_overtakes=max_overtakes)
    arrived: dict[int, int] = {}  # item: arrival
    begun: list[int] = []
    num_gone_before: dict[int, int] = {}  # of those who arrived later
    cancelled: set[int] = set()

    def leaves(item: int) -> None:
        for other in waiting:
            if arrived[other] < arrived[item]:
                num_gone_before[other] = num_gone_before.get(other, 0) + 1

    for time, (what, lengths) in enumerate([*steps, *[("pop", [])] * 240]):
        if what == "arrive":
            for length in lengths:
                arrived[len(arrived)] = time
                waiting.add(len(arrived) - 1, predicted_tokens=length, now=float(time))
        elif not waiting:
            continue
        elif what == "cancel":
            item = list(waiting)[len(waiting) // 2]
            waiting.remove(item)
            cancelled.add(item)
        else:
            waiter = waiting.pop()
            if what == "put back":
                waiting.put_back(waiter)
            else:
                begun.append(waiter.item)
                leaves(waiter.item)
    assert not waiting
    assert sorted([*begun, *cancelled]) == sorted(arrived)
    assert max(num_gone_before.values(), default=0) <= max_overtakes
    if policy == "first_come":
        assert begun == sorted(begun)


def test_ten_thousand_wait_in_no_time() -> None:
    rng = random.Random(0)
    waiting: WaitingQueue[int] = WaitingQueue("longest_first")
    lengths = [rng.randrange(500) for _ in range(10_000)]
    for number, length in enumerate(lengths):
        waiting.add(number, predicted_tokens=length, now=0.0)
    order = [waiting.pop().item for _ in range(10_000)]
    assert order == sorted(range(10_000), key=lambda number: (-lengths[number], number))
