"""Order, and nothing left running."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sot_chains.answering.reading_order import Arrivals, Crew, ReadingOrder, gather_or_cancel
from tests.sot_chains.fakes import other_tasks


async def test_a_crew_ends_together() -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.sleep(number)
        finally:
            ended.append(number)

    crew = Crew()
    crew.start(work(0))
    crew.start(work(100))
    await asyncio.sleep(0.01)
    crew.start(work(200))
    await asyncio.sleep(0)
    crew.cancel()
    await crew.stop()
    assert ended == [0, 100, 200]
    assert not other_tasks()


async def test_what_arrives_is_read_in_order_and_can_be_forgotten_before() -> None:
    arrivals = Arrivals[int]()
    reading = asyncio.create_task(arrivals.get())
    await asyncio.sleep(0)
    for number in range(6):
        arrivals.put(number)
    assert await reading == 0
    arrivals.forget(lambda number: number % 2 == 0)
    arrivals.put_back([10, 11])
    assert [await arrivals.get() for _ in range(5)] == [10, 11, 1, 3, 5]
    late = asyncio.create_task(arrivals.get())
    await asyncio.sleep(0)
    arrivals.put_back([7])
    assert await late == 7


@given(st.permutations([position for position in range(4) for _ in range(3)]))
def test_reading_order_whatever_the_order_of_arrival(order: list[int]) -> None:
    items = {position: iter([f"{position}a", f"{position}b", None]) for position in range(4)}
    reading = ReadingOrder[str](4)
    read: list[tuple[int, str | None]] = []
    arrived: list[str] = []
    for position in order:
        item = next(items[position])
        if item:
            arrived.append(item)
        read.extend(reading.arrive(position, item))
        # What was read is the longest prefix of the reading order that has arrived.
        texts = [text for _, text in read if text]
        assert texts == sorted(texts)
        following = [t for t in ("0a", "0b", "1a", "1b", "2a", "2b", "3a", "3b") if t not in texts]
        if following and following[0] in arrived:
            assert read[-1][1] is not None  # only because the one before has not ended yet
    assert [text for _, text in read if text] == ["0a", "0b", "1a", "1b", "2a", "2b", "3a", "3b"]


def test_a_position_can_be_forgotten_until_it_is_read() -> None:
    reading = ReadingOrder[str](2)
    assert list(reading.arrive(1, "old")) == []
    assert not reading.is_read(1)
    reading.forget(1)
    assert list(reading.arrive(1, "new")) == []
    assert list(reading.arrive(0, None)) == [(0, None), (1, "new")]
    assert reading.is_read(1)
    assert list(reading.arrive(2, None)) == []  # positions may be added
    assert list(reading.arrive(1, None)) == [(1, None), (2, None)]


async def test_gathering() -> None:
    async def value(number: int) -> int:
        await asyncio.sleep(0)
        if number < 0:
            raise ValueError("negative")
        return number

    assert await gather_or_cancel([value(1), value(2)]) == [1, 2]
    with pytest.raises(ValueError, match="negative"):
        await gather_or_cancel([asyncio.sleep(10, 0), value(-1)])
    assert not other_tasks()
