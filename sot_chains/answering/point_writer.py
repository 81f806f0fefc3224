"""Writing the places of an answer, each by one call, and what happens to one whose call fails."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

from sot_chains.answering.reading_order import ReadingOrder
from sot_chains.answering.record import AnswerRecord
from sot_chains.calls.model_call import Caller, Request
from sot_chains.calls.options import SotOptions
from sot_chains.calls.reply import Restarted, TextDelta
from sot_chains.calls.trace import Call, PointState, Status, StoppedBy
from sot_chains.filters.guards import Guard, Guarded, OverrunGuard, SentenceBound
from sot_chains.filters.reply_text import HeadingStripper
from sot_chains.outline.skeleton import Point
from sot_chains.providers.loops import LoopGuard

_SENTENCE_END = re.compile(r"[.!?。！？][\"'”’)*]*\s*$")
_NUM_COMPARED = 20


class PointDelta(NamedTuple):
    """A text delta of one point.

    Attributes:
        point: The point it belongs to; ``None`` for a conclusion, and if the model answers plainly.
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
        if place.point or place.pieces:
            self._note_first_text()
        self._tell(place, "".join(place.pieces))
        return place

    async def write(self, place: PointState, request: Request) -> None:
        """Writes ``place``, unless it was taken over whole from an earlier answer.

        Raises:
            PlainInsteadError: The call failed and the policy is ``"plain"``.
            Exception: The call failed and the policy is ``"raise"``.
        """
        if place.is_ended or not await self._has_what_it_needs(place):
            return
        call, text = self._begin(place), self._text_of(place, request)
        try:
            asked: Request | None = request
            while asked:
                stream = self._caller.stream(call, asked, is_read=partial(self._is_read, place))
                async with aclosing(stream) as events:
                    async for event in events:
                        match event:
                            case TextDelta(piece):
                                self._add(place, text.feed(piece))
                            case Restarted():
                                place.pieces.clear()
                                text = self._text_of(place, asked)
                        if text.stopped_by or place.is_ended:
                            break
                self._add(place, text.end(is_cut=call.is_cut_off))
                # An empty point is asked for once more, with a reply that the model begins itself.
                is_to_repeat = not place.pieces and place.point and asked is request
                asked = self._asking_again(request) if is_to_repeat else None
                if asked:
                    call, text = self._begin(place), self._text_of(place, asked)
        except Exception as error:  # the failure policy decides what happens to the place
            self._add(place, text.end())
            self._fail(place, call, error)
        except asyncio.CancelledError:
            self._add(place, text.end())
            raise
        else:
            place.stopped_by = cast("StoppedBy | None", text.stopped_by)
            self._end(place, call)
        self._order.wake()

    def _asking_again(self, request: Request) -> Request | None:
        """The request for a text that came out empty; ``None`` if the reply would be the same."""
        if not (self._method.prefills and request.prefill):
            return None
        return replace(request, prefill=False)

    async def _has_what_it_needs(self, place: PointState) -> bool:
        """Waits for the places that ``place`` builds on; if one of them has failed, so has it."""
        for needed in place.needs:
            await needed.wait()
        lacking = [needed for needed in place.needs if not needed.pieces or needed.has_failed]
        if not lacking or (place.part and len(lacking) < len(place.needs)):
            return True
        numbers = ", ".join(str(needed.point.number) for needed in lacking if needed.point)
        status: Status = "omitted" if lacking[0].status == "omitted" else "failed"
        place.end(status, f"it builds on {numbers}, of which there is no whole text")
        self._order.wake()
        return False

    def _end(self, place: PointState, call: Call) -> None:
        """Ends a place whose call has ended well, with a whole text or the beginning of one."""
        ended = f"it ended with {call.finish_reason!r}"
        if place.is_ended:
            return
        if not place.pieces:
            is_plain = not (place.point or place.part)
            place.end("failed" if is_plain else "omitted", f"the model wrote nothing; {ended}")
        elif place.stopped_by or not call.is_cut_off:
            place.end("complete")
        elif call.has_our_bound and call.is_out_of_tokens and _is_rounded_off(place.text, call.text):
            place.stopped_by = "length"
            place.end("complete")
        else:
            advice = "; raise max_tokens" if call.is_out_of_tokens else ""
            place.end("cut", f"the model was stopped before the end: {ended}{advice}")

    def _begin(self, place: PointState) -> Call:
        name = f"point_{place.point.number}" if place.point else place.part
        call = Call(name, "points") if name else Call("plain", "plain")
        place.call = self._record.begin(call)
        return place.call

    def _text_of(self, place: PointState, request: Request) -> Guarded:
        """Cleans the text of a place, and ends it where its model goes wrong."""
        guards: dict[str, Guard] = {}
        if place.point:
            guards["heading"] = HeadingStripper(place.point)
        if place.point:
            guards["overrun"] = OverrunGuard(place.point, request.skeleton.folded)
        if self._method.loop_guard:
            guards["loop"] = LoopGuard()
        if (bounds := request.bounds) and bounds.max_words:
            is_bounded = bounds.max_tokens is not None
            guards["length"] = SentenceBound(bounds.max_words, gives_sentences=is_bounded)
        return Guarded(guards)

    def _add(self, place: PointState, text: str) -> None:
        if text:
            place.pieces.append(text)
            self._note_first_text()
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
        if place.part:  # the answer is one without it
            place.end("cut" if place.num_read else "omitted", f"{type(error).__name__}: {error}")
            return
        place.has_failed = True
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


def _is_rounded_off(text: str, written: str) -> bool:
    """Whether ``text`` ends with a sentence, or without the unfinished one that was ``written`` last."""
    return bool(_SENTENCE_END.search(text)) or not written.rstrip().endswith(text.rstrip()[-_NUM_COMPARED:])
