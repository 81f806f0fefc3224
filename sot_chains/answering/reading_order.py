"""Reading the parts of an answer in order while they are written. Knows parts, not who writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from sot_chains.answering.state import Part
from sot_chains.outline.skeleton import Point


class ReadingOrder:
    """Reads parts from first to last, each piece of text as early as it can be read.

    The first part that has not ended is read while it is written; later ones wait for their turn.

    Args:
        parts: The parts, to which others may be appended.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._current = 0
        self._is_announced = False
        self._is_closed = False
        self._reader: asyncio.Future[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything has been read, be it the heading of a point."""
        return self._current > 0 or self._is_announced

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
        while True:
            while (piece := self._next()) is not None:
                yield piece
            if self._is_closed:
                return
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _next(self) -> tuple[Part, str] | None:
        while self._current < len(self._parts):
            part = self._parts[self._current]
            if not self._is_announced:
                if part.status == "omitted":
                    self._current += 1
                    continue
                if part.status is None and (not part.pieces or (part.is_compared and self._current)):
                    return None  # it may come to nothing, and then is left out
                self._is_announced = True
                return part, ""
            if part.num_read < len(part.pieces):
                part.num_read += 1
                if part.call:
                    part.call.is_read = True
                return part, part.pieces[part.num_read - 1]
            if part.status is None:
                return None
            self._current, self._is_announced = self._current + 1, False
        return None


class AnswerText:
    """Writes "1. **Heading**: text", a blank line, the next point. Other text stands before or after.

    Points are numbered as they come, because some may be left out.

    Args:
        separator: Stands between a heading and its text.
    """

    def __init__(self, separator: str) -> None:
        self._separator = separator
        self._point: Point | None = None
        self._num_points = 0
        self._has_any = False
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
