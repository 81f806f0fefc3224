"""An answer while it is written: in reading order, and in all places at once.

Knows parts, no writers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from langchain_core.messages import AIMessage

from sot_chains.aio.blocking import cancel_and_wait
from sot_chains.answering.record import Part, PointDelta
from sot_chains.outline.skeleton import Point


class ReadingOrder:
    """Reads parts from first to last, each piece of text as early as it can be read.

    The first part that has not ended is read while it is written; later ones wait for their turn.

    Args:
        parts: The parts, to which others may be appended.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._is_closed = False
        self._reader: asyncio.Future[None] | None = None
        self.has_begun = False  # whether anything has been read, be it the heading of a point

    def wake(self) -> None:
        """Tells the reader that something has changed in a part."""
        if self._reader and not self._reader.done():
            self._reader.set_result(None)

    def close(self) -> None:
        """Ends the reading after what can still be read: nothing more will change."""
        self._is_closed = True
        self.wake()

    async def read(self) -> AsyncGenerator[tuple[Part, str], None]:
        """Yields ``(part, text)`` in reading order. Each part is first announced with an empty text."""
        number = 0
        while not self._is_closed or number < len(self._parts):
            part = self._parts[number] if number < len(self._parts) else None
            if part is None or (part.status is None and (not part.pieces or (part.is_compared and number))):
                if self._is_closed:
                    return
                await self._change()  # it may come to nothing, and then is left out
                continue
            number, self.has_begun = number + 1, True
            if part.status == "omitted":
                continue
            yield part, ""
            while part.num_read < len(part.pieces) or (part.status is None and not self._is_closed):
                if part.num_read == len(part.pieces):
                    await self._change()
                    continue
                part.num_read += 1
                if part.call:
                    part.call.is_read = True
                yield part, part.pieces[part.num_read - 1]

    async def _change(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader


class AnswerText:
    """Writes "1. **Heading**: text", a blank line, the next point. Other text stands before or after.

    Points are numbered as they come, because some may be left out.

    Args:
        separator: Stands between a heading and its text.
        num_points: How many points stand before.
        has_any: Whether anything stands before.
    """

    def __init__(self, separator: str, num_points: int = 0, has_any: bool = False) -> None:
        self._separator = separator
        self._point: Point | None = None
        self._num_points, self._has_any = num_points, has_any
        self._has_text = False  # of the point, or of what stands around the points

    def add(self, point: Point | None, text: str) -> str:
        """What to write when ``text`` is added to ``point``. Points come in order."""
        written = ""
        if point is not self._point:
            self._has_text = False
        if point is None:  # the conclusion, or a plain answer
            written = "\n\n" if text and self._has_any and not self._has_text else ""
        elif point is not self._point:
            self._num_points += 1
            written = ("\n\n" if self._has_any else "") + f"{self._num_points}. **{point.text}**"
        if text and point is not None and not self._has_text:
            written += self._separator
        self._point = point
        self._has_text |= bool(text)
        self._has_any |= bool(written or text)
        return written + text


Arrival: TypeAlias = tuple[Part, str | None]  # text that was added to a part; None once it has ended
Arrivals: TypeAlias = AsyncGenerator[Arrival | AIMessage, None]  # at the end the finished answer


async def read_arrivals(
    write: Callable[[Callable[[Arrival], None]], Coroutine[Any, Any, AIMessage]],
) -> Arrivals:
    """Yields what ``write`` hands to its argument, and at the end its result. Closing stops it."""
    arrivals: asyncio.Queue[Arrival | None] = asyncio.Queue()
    task = asyncio.create_task(write(arrivals.put_nowait))
    task.add_done_callback(lambda _: arrivals.put_nowait(None))
    try:
        while (arrival := await arrivals.get()) is not None:
            yield arrival
        yield await task
    finally:
        await cancel_and_wait([task])


class PointStream(AsyncIterator[PointDelta]):
    """Iterates over :class:`PointDelta` in the order of arrival; then holds the finished message.

    Each point is first announced by a delta without text, all of them as soon as the skeleton is known.
    Closing the stream, or dropping it, stops what is still being written.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._message: AIMessage | None = None
        self._arrivals = arrivals

    @property
    def message(self) -> AIMessage:
        """The finished answer.

        Raises:
            RuntimeError: The stream has not been read to its end.
        """
        if self._message is None:
            raise RuntimeError("the answer is not finished: read the stream to its end first")
        return self._message

    async def __anext__(self) -> PointDelta:
        async for arrival in self._arrivals:
            if isinstance(arrival, AIMessage):
                self._message = arrival
            elif arrival[1] is not None:
                return PointDelta(arrival[0].point, arrival[1])
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stops writing. Returns when nothing is left running."""
        await self._arrivals.aclose()
