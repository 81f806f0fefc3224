"""How the points of an answer become its text."""

from __future__ import annotations

from collections.abc import Iterable

from sot_chains.skeleton import Point


class Layout:
    """Writes "1. **Heading**: text", a blank line, the next point. An answer without points is just text.

    Args:
        separator: Stands between a heading and its text.
    """

    def __init__(self, separator: str) -> None:
        self._separator = separator
        self._point: Point | None = None
        self._has_text = False

    def add(self, point: Point | None, text: str) -> str:
        """What to write when ``text`` is added to ``point``. Points come in order."""
        if point is None:
            return text
        written = ""
        if point is not self._point:
            written = ("\n\n" if self._point else "") + f"{point.number}. **{point.text}**"
            self._point, self._has_text = point, False
        if text and not self._has_text:
            written += self._separator
            self._has_text = True
        return written + text

    def whole(self, texts: Iterable[tuple[Point | None, str]]) -> str:
        """The finished answer, from each point and its text."""
        return "".join(self.add(point, text) for point, text in texts)
