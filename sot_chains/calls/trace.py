"""What an answer records of its making, found in ``response_metadata["sot"]``.

Plain dicts of JSON values, so that it survives every serialiser. Times are in seconds since the answer was
begun. No key is called ``index``: LangChain merges dicts of streamed messages that share one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal, TypedDict

from langchain_core.messages.ai import UsageMetadata, add_usage

from sot_chains.calls.usage import Cost, Tokens, added, num_tokens
from sot_chains.outline.skeleton import Point
from sot_chains.providers.base import Delta, is_filtered, is_out_of_tokens

Status = Literal["complete", "cut", "failed", "omitted"]
StoppedBy = Literal["overrun", "loop", "length"]


class CallTrace(TypedDict):
    """One model call, with all its attempts.

    ``start_seconds`` is when its last attempt was sent, after any wait for limits; ``first_text_seconds`` is
    ``None`` for a call that wrote nothing, ``usage`` for one whose usage was not reported. What attempts
    took that were cut before their usage arrived is in ``estimated``, and in the answer's cost.
    ``reasoning_tokens`` are those of the output that went into reasoning, which is not part of the text.
    """

    start_seconds: float
    first_text_seconds: float | None
    end_seconds: float
    usage: UsageMetadata | None
    finish_reason: str | None
    num_requests: int
    estimated: Tokens | None
    reasoning_tokens: int


class PointTrace(CallTrace):
    """One point, or the conclusion, and the call that wrote it.

    Attributes:
        status: ``"complete"``; ``"cut"`` if the text ends before its end; ``"failed"`` if there is none;
            ``"omitted"`` if the point was left out of the answer because it failed.
        reason: Why, if it is not complete.
        stopped_by: Why its text was ended before the model ended it: ``"overrun"`` if another point began,
            ``"loop"`` if it repeated itself, ``"length"`` at the end of a sentence once it was long enough.
        is_resumed: Whether it was written for an earlier answer that this one goes on with; what it took
            then is not part of this answer's usage.
        needs: The numbers of the points that were written before it, since it builds on them.
    """

    number: int
    label: str
    text: str
    status: Status
    reason: str | None
    stopped_by: StoppedBy | None
    is_resumed: bool
    needs: list[int]


class Failure(TypedDict):
    """A point that is not, or not wholly, in the answer."""

    number: int
    label: str
    status: Status
    reason: str


class SotTrace(TypedDict):
    """How one answer came about.

    Attributes:
        route: ``"sot"``; ``"graph"`` where points build on each other, or were to; ``"plain"`` where the
            model answered in one piece.
        route_reason: Why that route.
        is_complete: Whether nothing failed, was cut or was left out.
        failures: What did, and why. Pass the trace as ``resume=`` to have failed points written again. A
            plain answer that was cut has the number 0.
        skeleton: The headings of the points; on the plain route, of what little was found.
        skeleton_reply: What the model replied to the skeleton request, ``None`` if it was not asked.
        skeleton_call: The call of the first stage, ``None`` if it was not made.
        points: The calls of the second stage, in reading order.
        conclusion: The call that wrote the conclusion with all points in view, ``None`` if there is none.
        plain_call: The call of the plain route, else ``None``.
        plain_stopped_by: ``"loop"`` if the plain answer was ended because it repeated itself.
        seconds: From beginning to end.
        first_text_seconds: When the first text of the answer could be read, headings included.
        critical_path_seconds: What no amount of parallelism saves: the skeleton and then the longest chain
            of points that build on each other, or the whole time if that is less.
        num_calls: Model calls made.
        num_requests: Attempts made for them.
        usage: Tokens of all calls as reported, ``None`` if no call reported any.
        cost: Tokens by stage, estimates for calls cut short, price, and overhead over a plain answer.
    """

    route: Literal["sot", "graph", "plain"]
    route_reason: str
    is_complete: bool
    failures: list[Failure]
    skeleton: list[str]
    skeleton_reply: str | None
    skeleton_call: CallTrace | None
    points: list[PointTrace]
    conclusion: PointTrace | None
    plain_call: CallTrace | None
    plain_stopped_by: StoppedBy | None
    seconds: float
    first_text_seconds: float | None
    critical_path_seconds: float
    num_calls: int
    num_requests: int
    usage: UsageMetadata | None
    cost: Cost


@dataclass(slots=True)
class Call:
    """A model call while it is made, over all its attempts.

    Attributes:
        name: What its run is called.
        stage: Whose cost it is.
        attempt: The estimate of what an attempt without reported usage took; ``None`` if there is none.
        pieces: What the model has written in this attempt, raw.
        reasoning: The reasoning of this attempt, be it part of the text or reported beside it.
        has_our_bound: Whether the number of tokens it may take is that of the request, not one of the user.
    """

    name: str
    stage: Literal["skeleton", "points", "plain"]
    start_seconds: float = 0.0
    first_text_seconds: float | None = None
    end_seconds: float = 0.0
    usage: UsageMetadata | None = None
    finish_reason: str | None = None
    model_name: str | None = None
    is_begun: bool = False
    num_requests: int = 0
    estimated: Tokens | None = None
    attempt: Tokens | None = None
    pieces: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    has_our_bound: bool = False

    def begin(self, now_seconds: float) -> None:
        """Notes that an attempt begins now."""
        self.is_begun = True
        self.start_seconds = self.end_seconds = now_seconds
        self.first_text_seconds = self.usage = self.finish_reason = self.attempt = None
        if self.pieces or self.reasoning:
            self.pieces, self.reasoning = [], []

    def note_sent(self) -> None:
        """Notes that a request has left."""
        self.num_requests += 1

    def note(self, delta: Delta) -> None:
        """Notes what ``delta`` says of the call besides text."""
        if delta.usage is not None:
            self.usage = delta.usage if self.usage is None else add_usage(self.usage, delta.usage)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
        metadata = delta.response_metadata or {}
        if isinstance(name := metadata.get("model_name") or metadata.get("model"), str):
            self.model_name = name

    def cut(self, estimated: Tokens) -> None:
        """Notes that the attempt broke off before its usage arrived, and took about ``estimated`` tokens."""
        self.estimated = added(estimated, self.estimated)
        self.usage, self.attempt = None, estimated

    @property
    def is_out_of_tokens(self) -> bool:
        """Whether the model was stopped at a number of tokens."""
        return is_out_of_tokens(self.finish_reason)

    @property
    def is_cut_off(self) -> bool:
        """Whether the model was stopped before the end of its reply."""
        return self.is_out_of_tokens or is_filtered(self.finish_reason)

    @property
    def text(self) -> str:
        """The text of the attempt so far, as the model wrote it."""
        return "".join(self.pieces)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of its last attempt that went into reasoning: as reported, or estimated from the text."""
        details = self.usage.get("output_token_details") if self.usage else None
        reported = details.get("reasoning") if details else None
        return reported or (num_tokens("".join(self.reasoning)) if self.reasoning else 0)

    @property
    def seconds(self) -> float:
        """How long its last attempt took."""
        return self.end_seconds - self.start_seconds

    def trace(self) -> CallTrace:
        """The call as it goes into the answer's trace."""
        return CallTrace(
            start_seconds=self.start_seconds,
            first_text_seconds=self.first_text_seconds,
            end_seconds=self.end_seconds,
            usage=self.usage,
            finish_reason=self.finish_reason,
            num_requests=self.num_requests,
            estimated=self.estimated,
            reasoning_tokens=self.reasoning_tokens,
        )


@dataclass(slots=True, eq=False)
class PointState:
    """One place of the answer while it is written: a point, what stands around them, or a plain answer.

    Attributes:
        point: The point; ``None`` for what is none.
        call: The call that writes it.
        pieces: Its cleaned text.
        num_read: How many of them the reader of a stream has seen.
        status: How it has ended; ``None`` while it is being written.
        stopped_by: Which guard has ended its text.
        resumed: The point's trace in an earlier answer, if it was taken over from there.
        part: What it is, if it is neither a point nor a plain answer.
        needs: The places that are written before it, since it builds on them.
        has_failed: Whether its call ended with an error.
    """

    point: Point | None
    call: Call | None = None
    pieces: list[str] = field(default_factory=list)
    num_read: int = 0
    status: Status | None = None
    reason: str | None = None
    stopped_by: StoppedBy | None = None
    resumed: PointTrace | None = None
    part: Literal["conclusion"] | None = None
    needs: Sequence[PointState] = ()
    has_failed: bool = False
    _ended: asyncio.Event | None = None

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.status is not None

    def end(self, status: Status, reason: str | None = None) -> None:
        """Ends it with the text it has."""
        self.status, self.reason = status, reason
        if self._ended:
            self._ended.set()

    async def wait(self) -> None:
        """Waits until it has ended."""
        if not self.is_ended:
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self.pieces)

    def trace(self) -> PointTrace:
        """The point as it goes into the answer's trace. A conclusion has the number 0."""
        if self.resumed is not None:
            return {"needs": [], **self.resumed, "is_resumed": True}
        call = (self.call or Call("", "points")).trace()
        return PointTrace(
            number=self.point.number if self.point else 0,
            label=self.point.text if self.point else "",
            text=self.text,
            status=self.status or ("cut" if self.pieces else "failed"),
            reason=self.reason,
            stopped_by=self.stopped_by,
            is_resumed=False,
            needs=[place.point.number for place in self.needs if place.point and self.point],
            **call,
        )


def total_usage(calls: Iterable[Call]) -> UsageMetadata | None:
    """The tokens of all ``calls`` together, ``None`` if none of them reported any."""
    reported = [call.usage for call in calls if call.usage is not None]
    return reduce(add_usage, reported) if reported else None
