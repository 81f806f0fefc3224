"""Order, and nothing left running."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sot_chains.aio.blocking import Tasks, gather_or_cancel
from sot_chains.answering.record import Part
from sot_chains.answering.streams import ReadingOrder
from tests.sot_chains.fakes import nothing_runs, other_tasks


async def test_tasks_end_together_with_the_first_error() -> None:
    ended: list[int] = []
    tasks = Tasks()

    async def work(number: int) -> None:
        try:
            if number == 1:
                tasks.start(work(100))  # a task may start others
            await asyncio.sleep(number / 100)
            if number == 2:
                raise ValueError("two")
        finally:
            ended.append(number)

    await Tasks().join()
    for number in (0, 1, 2, 200):
        tasks.start(work(number))
    with pytest.raises(ValueError, match="two"):
        await tasks.join()
    assert sorted(ended) == [0, 1, 2, 100, 200]
    assert not other_tasks()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_while_tasks_end_is_not_lost() -> None:
    tasks = Tasks()

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.1)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    tasks.start(slow_to_end())
    tasks.start(fail())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await tasks.join()
    assert await nothing_runs(turns=100_000)


@given(st.permutations([0, 1, 2, 3] * 3), st.lists(st.booleans(), min_size=12))
def test_reading_order_whatever_the_order_of_arrival(order: list[int], reads: list[bool]) -> None:
    """What has been read is always the longest prefix of the reading order that has arrived."""

    async def read() -> None:
        parts = [Part() for _ in range(4)]
        reading = ReadingOrder(parts)
        texts = {number: iter([f"{number}a", f"{number}b", None]) for number in range(4)}
        arrived: list[str] = []
        seen: list[str] = []
        whole = [f"{number}{letter}" for number in range(4) for letter in "ab"]

        async def keep_reading() -> None:
            async for _, text in reading.read():
                if text:
                    seen.append(text)

        task = asyncio.create_task(keep_reading())
        for number, reads_now in zip(order, reads, strict=False):
            if (text := next(texts[number])) is None:
                parts[number].end("complete")
            else:
                parts[number].pieces.append(text)
                arrived.append(text)
            reading.wake()
            if reads_now:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert seen == whole[: len(seen)]
                following = whole[len(seen) :][:1]
                if following and following[0] in arrived:  # the part before has not ended yet
                    assert parts[int(following[0][0]) - 1].status is None
        reading.close()
        await task
        assert seen == whole
        assert all(part.num_read == 2 for part in parts)

    asyncio.run(read())


async def test_a_part_can_be_discarded_until_it_is_read_and_an_omitted_one_is_not_announced() -> None:
    parts = [Part(), Part(), Part()]
    reading = ReadingOrder(parts)
    assert not reading.has_begun
    pieces = reading.read()
    first = asyncio.ensure_future(anext(pieces))
    await asyncio.sleep(0)
    assert not reading.has_begun  # it may still come to nothing
    parts[0].pieces.append("its text")
    reading.wake()
    assert await first == (parts[0], "")
    assert reading.has_begun
    parts[1].pieces.append("old")
    assert parts[1].num_read == 0
    parts[1].pieces[:] = ["new"]
    parts[1].end("complete")
    parts[0].end("complete")
    parts[2].pieces.append("begun, and never read")
    parts[2].end("omitted")
    reading.close()
    assert [piece async for piece in pieces] == [(parts[0], "its text"), (parts[1], ""), (parts[1], "new")]
    await pieces.aclose()


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
