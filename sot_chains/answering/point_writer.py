"""Writing the units of an answer: each in a task of its own.

What becomes of a unit that failed is the user's policy; this module carries out what concerns the unit alone
and leaves to the answer what concerns all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sot_chains.answering.point_tasks import PointReply, PointTask
from sot_chains.answering.reading_order import Arrivals, Crew
from sot_chains.answering.record import AnswerRecord
from sot_chains.calls.model_call import Caller
from sot_chains.calls.options import Policy, SotOptions, has_ended_itself
from sot_chains.calls.trace import Call

EVERYWHERE = -1  # the position of what concerns the whole answer


@dataclass(frozen=True, slots=True)
class Refused:
    """A unit failed and the policy is not to go on as if nothing had happened."""

    unit: PointTask
    error: Exception
    policy: Policy


@dataclass(frozen=True, slots=True)
class Late:
    """The deadline has passed."""


# A piece of text, its end (None), or what concerns the whole answer.
Arrival = tuple[int, str | Refused | Late | Exception | None]


class PointWriter:
    """Runs units and brings what they write.

    Args:
        method: How answers are written.
        caller: Makes the calls.
        record: Where calls and places are.
        arrivals: Where text is brought.
        is_watched: Whether text matters before it is whole.
        forget: Takes back the text brought for a unit; ``False`` if it has been read.
    """

    def __init__(
        self,
        method: SotOptions,
        caller: Caller,
        record: AnswerRecord,
        arrivals: Arrivals[Arrival],
        *,
        is_watched: bool,
        forget: Callable[[PointTask], bool],
    ) -> None:
        self._method = method
        self._caller = caller
        self._record = record
        self._arrivals = arrivals
        self._is_watched = is_watched
        self._forget = forget
        self.crew = Crew()
        self.errors: list[Exception] = []

    def start(self, unit: PointTask) -> None:
        """Starts writing ``unit``."""
        unit.task = self.crew.start(self._run(unit))

    def drop(self, unit: PointTask) -> None:
        """Stops writing ``unit``, whose points are not in the skeleton after all."""
        for one in (unit, *unit.children):
            if one.task:
                one.task.cancel()
        self._arrivals.forget(lambda arrival: arrival[0] in unit.positions)

    async def _run(self, unit: PointTask) -> None:
        try:
            call, reply = self._begin(unit)
            await self._caller.make(call, unit, reply)
            reply.end()
        except Exception as error:  # the failure policy decides what becomes of it
            self._fail(unit, error)
        else:
            self._finish(unit, call)

    def _begin(self, unit: PointTask) -> tuple[Call, PointReply]:
        call = self._record.begin(Call(unit.name, "points" if unit.points else "plain"))
        places = [self._record.places[position] for position in unit.positions]
        for number, place in enumerate(places):
            place.call = place.call or call
            if number:
                place.is_first_of_call, place.shares_call_of = False, unit.points[0].number
        return call, PointReply(
            unit=unit,
            places=places,
            call=call,
            method=self._method,
            show=self._show if self._is_watched else _keep,
            forget=self._forget,
        )

    def _show(self, position: int, text: str) -> None:
        self._arrivals.put((position, text))

    def _finish(self, unit: PointTask, call: Call) -> None:
        missing = []
        for position, point in zip(unit.positions, unit.points, strict=False):
            place = self._record.places[position]
            if place.pieces:
                continue
            if unit.alone and has_ended_itself(call):
                missing.append((position, point))
                continue
            place.status = "failed"
            place.reason = f"the model wrote nothing; it ended with {call.finish_reason!r}"
        for position, point in missing:  # the reply left it out: it is asked for alone
            place = self._record.places[position]
            place.call, place.is_first_of_call, place.shares_call_of = None, True, None
            if unit.alone:
                unit.children.append(unit.alone(position, point))
                self.start(unit.children[-1])
        asked_again = {position for position, _ in missing}
        for position in unit.positions:
            if position not in asked_again:
                self._end(position)

    def _fail(self, unit: PointTask, error: Exception) -> None:
        self.errors.append(error)
        policy = self._method.policy(unit.points[0] if unit.points else None, error)
        if policy in ("raise", "plain"):
            self._arrivals.put((EVERYWHERE, Refused(unit, error, policy)))
        else:
            self.give_up(unit, f"{type(error).__name__}: {error}", omit=policy == "omit")

    def give_up(self, unit: PointTask, reason: str, *, omit: bool) -> None:
        """Ends the places of ``unit`` with what they have."""
        places = [self._record.places[position] for position in unit.positions]
        begun = [place for place in places if place.pieces]
        for position, place in zip(unit.positions, places, strict=True):
            if place not in begun[:-1]:  # of several, those before the last begun one are whole
                place.status = "omitted" if omit else "cut" if place.pieces else "failed"
                place.reason = reason
            self._end(position)

    def _end(self, position: int) -> None:
        self._record.places[position].is_ended = True
        self._arrivals.put((position, None))


def _keep(position: int, text: str) -> None:
    """Nobody watches: the text is kept in its place, and read when it is whole."""
