"""Several filters in a row, through which the text of a part passes while it is streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextFilter(Protocol):
    """Passes a text on until it has to end.

    Attributes:
        is_over: Whether the text ends here; nothing more needs to be fed.
    """

    is_over: bool

    def feed(self, piece: str) -> str:
        """The text that is sure to stay now."""
        ...

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece; ``is_cut`` if the model was stopped at a number of tokens."""
        ...


class Pipeline:
    """A text that passes through ``filters`` in turn, and ends with the first of them that ends it.

    Attributes:
        ended_by: That filter.
    """

    def __init__(self, filters: Sequence[TextFilter]) -> None:
        self._filters = filters
        self.ended_by: TextFilter | None = None

    def feed(self, piece: str) -> str:
        """The text that is sure to stay now."""
        for one in self._filters:
            if self.ended_by is not None:
                piece = (one.feed(piece) if piece else "") + ("" if one.is_over else one.end())
            elif piece:
                piece = one.feed(piece)
                if one.is_over:
                    self.ended_by = one
        return piece

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece; ``is_cut`` if the model was stopped at a number of tokens."""
        text = ""
        for one in self._filters:
            text = (one.feed(text) if text else "") + ("" if one.is_over else one.end(is_cut=is_cut))
        return text
