"""An answer as it grows in all places at once, for displays that show it so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from langchain_core.messages import AIMessage

from sot_chains.aio.tasks import cancel_and_wait
from sot_chains.answering.state import PointDelta


class PointStream:
    """Iterates over :class:`PointDelta` in the order of arrival; then holds the finished message.

    Each point is first announced by a delta without text, all of them as soon as the skeleton is known.
    Closing the stream, or dropping it, stops what is still being written.

    Args:
        arrivals: Where the deltas arrive.
        write: Writes the answer.
    """

    def __init__(
        self, arrivals: asyncio.Queue[PointDelta | None], write: Callable[[], Coroutine[Any, Any, AIMessage]]
    ) -> None:
        self._message: AIMessage | None = None
        self._deltas = self._read(arrivals, write)

    @property
    def message(self) -> AIMessage:
        """The finished answer.

        Raises:
            RuntimeError: The stream has not been read to its end.
        """
        if self._message is None:
            raise RuntimeError("the answer is not finished: read the stream to its end first")
        return self._message

    def __aiter__(self) -> PointStream:
        return self

    async def __anext__(self) -> PointDelta:
        delta = await anext(self._deltas)
        if isinstance(delta, AIMessage):
            self._message = delta
            await self.aclose()
            raise StopAsyncIteration
        return delta

    async def aclose(self) -> None:
        """Stops writing. Returns when nothing is left running."""
        await self._deltas.aclose()

    # Static, so that a stream that is dropped unread is garbage at once and its generator is closed.
    @staticmethod
    async def _read(
        arrivals: asyncio.Queue[PointDelta | None], write: Callable[[], Coroutine[Any, Any, AIMessage]]
    ) -> AsyncGenerator[PointDelta | AIMessage, None]:
        task = asyncio.create_task(write())
        task.add_done_callback(lambda _: arrivals.put_nowait(None))
        try:
            while (delta := await arrivals.get()) is not None:
                yield delta
            yield await task
        finally:
            await cancel_and_wait([task])
