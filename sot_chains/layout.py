"""How the points of an answer become its text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sot_chains.skeleton import Point


class Layout:
    """Writes "1. **Heading**: text", a blank line, the next point. An answer without points is just text.

    Args:
        points: The points, in reading order; none for an answer in one piece.
        separator: Stands between a heading and its text.
    """

    def __init__(self, points: Sequence[Point], separator: str) -> None:
        self._points = points
        self._separator = separator
        self._num_headings = 0
        self._has_text = False

    def add(self, place: int, text: str) -> str:
        """What to write when ``text`` is added to the point at ``place``. Places come in order."""
        if not self._points:
            return text
        written = ""
        if place == self._num_headings:
            point = self._points[place]
            written = ("\n\n" if place else "") + f"{point.number}. **{point.text}**"
            self._num_headings, self._has_text = place + 1, False
        if text and not self._has_text:
            written += self._separator
            self._has_text = True
        return written + text

    def whole(self, texts: Iterable[str]) -> str:
        """The finished answer, from the text of each place."""
        return "".join(self.add(place, text) for place, text in enumerate(texts))
