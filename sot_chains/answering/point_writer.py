"""Writing the places of an answer, each by one call, and what happens to one whose call fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import NamedTuple

from sot_chains.answering.reading_order import ReadingOrder
from sot_chains.answering.record import AnswerRecord
from sot_chains.calls.model_call import Caller, Request
from sot_chains.calls.options import SotOptions
from sot_chains.calls.reply import Restarted, TextDelta
from sot_chains.calls.trace import Call, PointState
from sot_chains.text.reply_text import HeadingStripper
from sot_chains.text.skeleton import Point


class PointDelta(NamedTuple):
    """A text delta of one point.

    Attributes:
        point: The point it belongs to; ``None`` if the model answers plainly, in one piece.
        text: What was added; ``""`` to announce that the point is being written.
    """

    point: Point | None
    text: str


class PlainInsteadError(Exception):
    """A point failed, and the failure policy wants a plain answer instead of all points."""

    def __init__(self, call: Call, error: Exception) -> None:
        super().__init__(f"{call.name} failed, so the answer is plain: {error}")


class PointWriter:
    """Writes places: pulls the text of a call, cleans it and hands it to the reader.

    Args:
        method: How answers are written.
        caller: Makes the calls.
        record: Where calls and places are recorded.
        order: The reader to wake when text has arrived.
        on_arrival: Called with each piece as it is written, in the order of arrival across places.
    """

    def __init__(
        self,
        method: SotOptions,
        caller: Caller,
        record: AnswerRecord,
        order: ReadingOrder,
        on_arrival: Callable[[PointDelta], None] | None,
    ) -> None:
        self._method = method
        self._caller = caller
        self._record = record
        self._order = order
        self._on_arrival = on_arrival
        self.errors: list[Exception] = []

    def announce(self, place: PointState) -> PointState:
        """Adds a place to the answer, so that its heading can be shown."""
        self._record.places.append(place)
        if place.point:
            self._note_first_text()
        self._tell(place, "".join(place.pieces))
        return place

    async def write(self, place: PointState, request: Request) -> None:
        """Writes ``place``, unless it was taken over whole from an earlier answer.

        Raises:
            PlainInsteadError: The call failed and the policy is ``"plain"``.
            Exception: The call failed and the policy is ``"raise"``.
        """
        if place.is_ended:
            return
        name = f"point_{place.point.number}" if place.point else "plain"
        call = place.call = self._record.begin(Call(name, "points" if place.point else "plain"))
        cleaner = HeadingStripper(place.point)
        try:
            async with aclosing(
                self._caller.stream(call, request, is_read=lambda: self._is_read(place))
            ) as events:
                async for event in events:
                    match event:
                        case TextDelta(text):
                            self._add(place, cleaner.feed(text))
                        case Restarted():
                            place.pieces.clear()
                            cleaner = HeadingStripper(place.point)
            self._add(place, cleaner.end())
        except Exception as error:  # the failure policy decides what happens to the place
            self._fail(place, call, error)
        else:
            if place.pieces or not place.point:
                place.end()
            else:
                place.end("failed", f"the model wrote nothing; it ended with {call.finish_reason!r}")
        self._order.wake()

    def _add(self, place: PointState, text: str) -> None:
        if text:
            self._note_first_text()
            place.pieces.append(text)
            self._tell(place, text)

    def _tell(self, place: PointState, text: str) -> None:
        if self._on_arrival:
            self._on_arrival(PointDelta(place.point, text))
        self._order.wake()

    def _note_first_text(self) -> None:
        if self._record.first_text_seconds is None:
            self._record.first_text_seconds = self._caller.now()

    def _is_read(self, place: PointState) -> bool:
        return place.num_read > 0 or (self._on_arrival is not None and bool(place.pieces))

    def _fail(self, place: PointState, call: Call, error: Exception) -> None:
        self.errors.append(error)
        reason = f"{type(error).__name__}: {error}"
        match self._method.policy(place.point, error):
            case "raise":
                raise error
            case "plain" if self._order.has_begun or self._on_arrival:
                place.end("omitted", f"{error}; the answer has been read too far to be given plainly instead")
            case "plain":
                raise PlainInsteadError(call, error)
            case "omit":
                place.end("omitted", reason)
            case _:
                place.end("cut" if place.pieces else "failed", reason)
