"""The parts of an answer while they are written. Knows calls by what is recorded of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sot_chains.calls.trace import Call, PointTrace, Status, StoppedBy
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
