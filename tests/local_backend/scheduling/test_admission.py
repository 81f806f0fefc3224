"""Order of admission: by policy, no row twice, none left out, none overtaken for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_backend.scheduling.admission import AdmissionQueue
from local_backend.scheduling.lengths import AdmissionPolicy, Prediction

POLICIES: tuple[AdmissionPolicy, ...] = ("first_come", "shortest_first", "longest_first")
LENGTHS: list[float | None] = [5, 9, None, 2, 9, 7]


def _predictions(lengths: list[float | None]) -> list[Prediction | None]:
    return [None if length is None else Prediction(length, length) for length in lengths]


def _waiting(policy: AdmissionPolicy, *, max_overtakes: int = 100) -> AdmissionQueue[int]:
    waiting: AdmissionQueue[int] = AdmissionQueue(policy, max_overtakes=max_overtakes)
    waiting.add(enumerate(_predictions(LENGTHS)))
    return waiting


def _items(waiting: AdmissionQueue[int]) -> list[int]:
    return [item for item, _ in waiting]


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
    assert _items(waiting) == [0, 1, 2, 3, 4, 5]
    assert [waiting.pop()[0] for _ in LENGTHS] == order
    assert not waiting
    with pytest.raises(IndexError):
        waiting.pop()


def test_what_is_put_back_waits_where_it_was() -> None:
    waiting = _waiting("longest_first")
    first, second = waiting.pop(), waiting.pop()
    waiting.put_back(*second)
    waiting.put_back(*first)
    assert _items(waiting) == [0, 1, 2, 3, 4, 5]
    assert [waiting.pop()[0] for _ in LENGTHS] == [2, 1, 4, 5, 0, 3]


def test_those_that_arrive_together_do_not_overtake_each_other() -> None:
    waiting = _waiting("longest_first", max_overtakes=0)
    waiting.add([(6, Prediction(100, 100))])
    # 2 begins first by the policy; then it would be 6, which came later.
    assert [waiting.pop()[0] for _ in range(7)] == [2, 0, 1, 3, 4, 5, 6]


def test_another_policy_orders_those_who_wait_anew() -> None:
    waiting = _waiting("first_come")
    first = waiting.pop()
    waiting.policy, waiting.max_overtakes = "longest_first", 5
    waiting.sort()
    assert waiting.pop()[0] == 2
    waiting.put_back(*first)
    assert [waiting.pop()[0] for _ in range(5)] == [1, 4, 5, 0, 3]


def test_who_may_be_long_begins_early_even_if_less_is_expected() -> None:
    waiting: AdmissionQueue[str] = AdmissionQueue("longest_first")
    waiting.add([("sure", Prediction(100, 110)), ("unsure", Prediction(90, 200))])
    assert waiting.pop()[0] == "unsure"


def test_free_slots_are_refilled_several_at_a_time_while_many_wait() -> None:
    waiting: AdmissionQueue[int] = AdmissionQueue()
    waiting.add((number, None) for number in range(4))
    assert [waiting.is_time(num_running=30, num_free=2) for _ in range(9)] == [False] * 8 + [True]
    assert not waiting.is_time(num_running=30, num_free=2)
    assert waiting.is_time(num_running=28, num_free=4)
    assert waiting.is_time(num_running=0, num_free=2)
    for _, ticket in list(waiting)[:2]:
        waiting.remove(ticket)
    assert waiting.is_time(num_running=30, num_free=2)  # nobody would be left waiting


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
    waiting: AdmissionQueue[int] = AdmissionQueue(policy, max_overtakes=max_overtakes)
    arrived: dict[int, int] = {}  # item: arrival
    begun: list[int] = []
    num_gone_before: dict[int, int] = {}  # of those who arrived later
    cancelled: set[int] = set()

    def leaves(item: int) -> None:
        for other in _items(waiting):
            if arrived[other] < arrived[item]:
                num_gone_before[other] = num_gone_before.get(other, 0) + 1

    for time, (what, lengths) in enumerate([*steps, *[("pop", [])] * 240]):
        if what == "arrive":
            items = range(len(arrived), len(arrived) + len(lengths))
            arrived.update(dict.fromkeys(items, time))
            waiting.add(zip(items, _predictions([*lengths]), strict=True))
        elif not waiting:
            continue
        elif what == "cancel":
            item, ticket = list(waiting)[len(waiting) // 2]
            assert waiting.remove(ticket) == item
            cancelled.add(item)
        else:
            item, ticket = waiting.pop()
            if what == "put back":
                waiting.put_back(item, ticket)
            else:
                begun.append(item)
                leaves(item)
    assert not waiting
    assert sorted([*begun, *cancelled]) == sorted(arrived)
    assert max(num_gone_before.values(), default=0) <= max_overtakes
    if policy == "first_come":
        assert begun == sorted(begun)


def test_ten_thousand_wait_in_no_time() -> None:
    rng = random.Random(0)
    waiting: AdmissionQueue[int] = AdmissionQueue("longest_first")
    lengths = [rng.randrange(500) for _ in range(10_000)]
    waiting.add(enumerate(_predictions([*lengths])))
    order = [waiting.pop()[0] for _ in range(10_000)]
    assert order == sorted(range(10_000), key=lambda number: (-lengths[number], number))
