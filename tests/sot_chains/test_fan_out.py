"""Order, and nothing left running."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sot_chains.fan_out import ReadingOrder, fan_out, gather_or_cancel
from tests.sot_chains.fakes import other_tasks


async def count(num: int, pause: float = 0.0, *, fail: bool = False) -> AsyncGenerator[int, None]:
    for number in range(num):
        await asyncio.sleep(pause)
        yield number
    if fail:
        raise RuntimeError("broke")


async def test_everything_arrives_and_each_end_is_told() -> None:
    async with aclosing(fan_out([count(2, 0.002), count(3), count(0)])) as arrivals:
        seen = [arrival async for arrival in arrivals]
    assert [item for position, item in seen if position == 0] == [0, 1, None]
    assert [item for position, item in seen if position == 1] == [0, 1, 2, None]
    assert [item for position, item in seen if position == 2] == [None]
    assert not other_tasks()


async def test_an_error_ends_the_others() -> None:
    with pytest.raises(RuntimeError, match="broke"):
        [_ async for _ in fan_out([count(100, 1), count(1, fail=True)])]
    assert not other_tasks()


async def test_leaving_ends_the_others() -> None:
    async with aclosing(fan_out([count(100, 1), count(5)])) as arrivals:
        await anext(arrivals)
    assert not other_tasks()


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
