"""Reading the places of an answer in order while they are written. Knows places, not who writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from sot_chains.calls.trace import PointState


class ReadingOrder:
    """Reads places from first to last, each piece of text as early as it can be read.

    The first place that has not ended is read while it is written; later ones wait for their turn.

    Args:
        places: The places, to which others may be appended.
    """

    def __init__(self, places: Sequence[PointState]) -> None:
        self._places = places
        self._current = 0
        self._is_announced = False
        self._is_closed = False
        self._reader: asyncio.Future[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything has been read, be it the heading of a point."""
        return self._current > 0 or self._is_announced

    def wake(self) -> None:
        """Tells the reader that something has changed in a place."""
        if self._reader and not self._reader.done():
            self._reader.set_result(None)

    def close(self) -> None:
        """Nothing more will change: the reader ends after what it can still read."""
        self._is_closed = True
        self.wake()

    async def read(self) -> AsyncGenerator[tuple[PointState, str], None]:
        """Yields ``(place, text)`` in reading order. Each place is first announced with an empty text."""
        while True:
            while (piece := self._next()) is not None:
                yield piece
            if self._is_closed:
                return
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _next(self) -> tuple[PointState, str] | None:
        while self._current < len(self._places):
            place = self._places[self._current]
            if not self._is_announced:
                if place.status == "omitted":
                    self._current += 1
                    continue
                self._is_announced = True
                return place, ""
            if place.num_read < len(place.pieces):
                place.num_read += 1
                return place, place.pieces[place.num_read - 1]
            if not place.is_ended:
                return None
            self._current, self._is_announced = self._current + 1, False
        return None
