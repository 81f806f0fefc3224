"""The replies of the second stage: one point each, several points, or a plain answer.

A unit is what one call writes: it knows its places in the answer and how raw text becomes theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from langchain_core.messages import BaseMessage

from sot_chains.calls.options import ReplyBounds, SotOptions
from sot_chains.calls.trace import Call, PointState
from sot_chains.providers.base import SharedPrefix
from sot_chains.text.reply_text import HeadingStripper, MultiPointSplitter
from sot_chains.text.skeleton import Point


class Text(Protocol):
    """Raw text in, cleaned text out, for the places of one unit."""

    def feed(self, piece: str) -> Iterable[tuple[int, str]]:
        """``(place of the unit, text)`` for what is clear now."""
        ...

    def end(self) -> Iterable[tuple[int, str]]:
        """The rest."""
        ...


class PlainText:
    """Text as it is."""

    def feed(self, piece: str) -> Iterable[tuple[int, str]]:
        """All of it."""
        return ((0, piece),)

    def end(self) -> Iterable[tuple[int, str]]:
        """Nothing."""
        return ()


class OnePoint:
    """The text of one point, without its heading."""

    def __init__(self, point: Point) -> None:
        self._text = HeadingStripper(point)

    def feed(self, piece: str) -> Iterable[tuple[int, str]]:
        """What can be shown of it now."""
        text = self._text.feed(piece)
        return ((0, text),) if text else ()

    def end(self) -> Iterable[tuple[int, str]]:
        """The rest."""
        text = self._text.end()
        return ((0, text),) if text else ()


@dataclass(eq=False, slots=True)
class PointTask:
    """What one call writes.

    Attributes:
        positions: Where in the answer it belongs.
        points: Its points, one for each position; none for a plain answer.
        request: How to ask for it.
        prefix: What the request shares with those of other units.
        bounds: Where the reply of a model that continues a begun one ends, besides where it ends itself.
        alone: How to ask for one of its points alone, where there are several.
        children: Those that were asked for so, since the reply had left them out.
    """

    positions: list[int]
    points: Sequence[Point]
    request: Callable[..., list[BaseMessage]]
    prefix: SharedPrefix | None = None
    bounds: ReplyBounds | None = None
    task: asyncio.Task[None] | None = None
    alone: Callable[[int, Point], PointTask] | None = None
    children: list[PointTask] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What the run of its call is called."""
        numbers = [point.number for point in self.points]
        match numbers:
            case []:
                return "plain"
            case [number]:
                return f"point_{number}"
            case _:
                return f"points_{numbers[0]}_to_{numbers[-1]}"

    def text(self, *, begun: bool) -> Text:
        """How to read its reply. ``begun`` says that the reply was begun with the first heading."""
        match self.points:
            case []:
                return PlainText()
            case [point]:
                return OnePoint(point)
            case _:
                return MultiPointSplitter(self.points, begun=begun)


@dataclass(slots=True)
class PointReply:
    """Takes the reply to one call of a unit and hands it to the unit's places.

    Attributes:
        show: Called with ``(position, text)`` for what is new.
        forget: Called to take back what was shown; ``False`` if somebody has read it.
    """

    unit: PointTask
    places: Sequence[PointState]
    call: Call
    method: SotOptions
    show: Callable[[int, str], None]
    forget: Callable[[PointTask], bool]
    _text: Text | None = None

    def take(self, text: str) -> None:
        """Takes the next raw piece."""
        if self._text is None:
            self._text = self.unit.text(begun=self.method.prefills)
        for place, cleaned in self._text.feed(text):
            self._add(place, cleaned)

    def end(self) -> None:
        """Takes note that the reply is whole."""
        if self._text is not None:
            for place, cleaned in self._text.end():
                self._add(place, cleaned)

    def start_over(self) -> bool:
        """Forgets the text of a failed attempt, unless it has been read."""
        if self._text is None:
            return True
        if not self.forget(self.unit):
            return False
        for place in self.places:
            place.pieces.clear()
        self._text = None
        return True

    def _add(self, place: int, text: str) -> None:
        self.places[place].pieces.append(text)
        self.show(self.unit.positions[place], text)
