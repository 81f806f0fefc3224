"""The parts of an answer while they are written, and what is taken over from an earlier answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Literal, NamedTuple

from sot_chains.calls.trace import Call, PointTrace, SotTrace, Status, StoppedBy
from sot_chains.outline.skeleton import Point


class PointDelta(NamedTuple):
    """A text delta of one point."""

    point: Point | None  # None for the conclusion, and if the model answers plainly
    text: str  # what was added; "" to announce that the point is being written


@dataclass(slots=True, eq=False)
class Part:
    """One part of an answer: a point, the conclusion, or the whole answer if it is plain."""

    point: Point | None = None
    kind: Literal["point", "conclusion", "plain"] = "point"
    call: Call | None = None  # that writes it
    pieces: list[str] = field(default_factory=list)  # of its text, filtered
    num_read: int = 0  # of them, by the reader of a stream
    status: Status | None = None  # None while it is being written
    reason: str | None = None  # why it is not complete
    stopped_by: StoppedBy | None = None  # the filter that has ended its text
    resumed: PointTrace | None = None  # its trace in an earlier answer, if it was taken over from there
    needs: Sequence[Part] = ()  # what is written before it, since it builds on it
    has_failed: bool = False  # whether its call ended with an error
    is_compared: bool = False  # whether it ends without what the points before it say
    _ended: asyncio.Event | None = None

    def end(self, status: Status, reason: str | None = None) -> None:
        """Ends it with the text it has."""
        self.status, self.reason = status, reason
        if self._ended:
            self._ended.set()

    async def wait(self) -> None:
        """Waits until it has ended."""
        if self.status is None:
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()

    @property
    def seconds(self) -> float:
        """How long the last attempt of its call took."""
        return self.call.end_seconds - self.call.start_seconds if self.call else 0.0

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self.pieces)

    def trace(self) -> PointTrace:
        """The part as it goes into the answer's trace. A conclusion has the number 0."""
        if self.resumed is not None:
            return {**self.resumed, "is_resumed": True}
        return PointTrace(
            number=self.point.number if self.point else 0,
            label=self.point.text if self.point else "",
            text=self.text,
            status=self.status or ("cut" if self.pieces else "failed"),
            reason=self.reason,
            stopped_by=self.stopped_by,
            is_resumed=False,
            needs=list(self.point.needs) if self.point else [],
            **(self.call or Call("", "points")).trace(),
        )


def points_of(trace: SotTrace) -> list[Point]:
    """The points of the skeleton of an earlier answer."""
    needs = {point["number"]: tuple(point["needs"]) for point in trace["points"]}
    return [Point(number, text, needs.get(number, ())) for number, text in enumerate(trace["skeleton"], 1)]


def whole_points(trace: SotTrace | None, points: Sequence[Point]) -> Mapping[str, PointTrace]:
    """By heading, those of ``points`` that the earlier answer has whole, and all they were written from."""
    earlier = {point["label"]: point for point in trace["points"]} if trace else {}
    texts = {point.number: point.text for point in points}
    whole: dict[str, PointTrace] = {}
    needs = {point.text: [texts[number] for number in point.needs] for point in points}
    for text in TopologicalSorter(needs).static_order() if earlier else ():
        point = earlier.get(text)
        if point and point["status"] == "complete" and all(need in whole for need in needs[text]):
            whole[text] = point
    return whole


def take_over(part: Part, earlier: PointTrace | None) -> Part:
    """Gives ``part`` the text that it has in an earlier answer, if that is complete."""
    if earlier is not None and earlier["status"] == "complete":
        part.pieces, part.resumed = [earlier["text"]], earlier
        part.end("complete")
    return part
