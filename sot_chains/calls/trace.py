"""What an answer records of its making, found in ``response_metadata["sot"]``.

Plain dicts of JSON values, so that it survives every serialiser. Times are in seconds since the answer was
begun. No key is called ``index``: LangChain merges dicts of streamed messages that share one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, TypedDict, cast

from langchain_core.messages.ai import UsageMetadata, add_usage

from sot_chains.calls.usage import Cost, Tokens, num_tokens, total_tokens
from sot_chains.providers.base import Delta, find_ending

Status = Literal["complete", "cut", "failed", "omitted"]
StoppedBy = Literal["overrun", "loop", "length"]


class CallTrace(TypedDict):
    """One model call, with all its attempts.

    ``start_seconds`` is when its last attempt was sent, after any wait for limits; ``first_text_seconds`` is
    ``None`` for a call that wrote nothing, ``usage`` for one whose usage was not reported. What attempts
    took whose usage did not arrive is in ``estimated``, and in the answer's cost.
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


_TRACED = tuple(CallTrace.__annotations__)
_get_traced = attrgetter(*_TRACED)


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
        usage: Tokens of all calls, as reported or else as estimated; ``None`` if none was answered.
        cost: Tokens by stage, estimates for calls cut short, and price.
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
        name: The name of its run.
        stage: The stage to which its cost belongs.
        reply_start: What the reply of this attempt was begun with; ``None`` if it was not.
        pieces: The raw text of this attempt.
        reasoning: The reasoning of this attempt, in the text or reported beside it.
        has_our_bound: Whether the profile, and not the user, bounds its tokens.
        is_read: Whether somebody has seen its text, so that it cannot be discarded.
    """

    name: str
    stage: Literal["skeleton", "points", "plain"]
    start_seconds: float = 0.0
    first_text_seconds: float | None = None
    end_seconds: float = 0.0
    usage: UsageMetadata | None = None
    finish_reason: str | None = None
    model_name: str | None = None
    num_requests: int = 0
    estimated: Tokens | None = None
    reply_start: str | None = None
    pieces: list[str] = field(default_factory=list)
    reasoning: str = ""
    has_our_bound: bool = False
    is_read: bool = False

    def begin(self, now_seconds: float) -> None:
        """Records that an attempt begins now, and its request is sent."""
        self.num_requests += 1
        self.start_seconds = self.end_seconds = now_seconds
        self.first_text_seconds = self.usage = self.finish_reason = None
        self.pieces, self.reasoning = [], ""

    def note(self, delta: Delta, now_seconds: float) -> None:
        """Records what ``delta`` says."""
        if delta.text:
            if self.first_text_seconds is None:
                self.first_text_seconds = now_seconds
            self.pieces.append(delta.text)
        self.reasoning += delta.reasoning
        if delta.usage is not None:
            self.usage = delta.usage if self.usage is None else add_usage(self.usage, delta.usage)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
        if metadata := delta.response_metadata:
            name = metadata.get("model_name") or metadata.get("model")
            self.model_name = name if isinstance(name, str) else self.model_name

    def cut(self, estimated: Tokens) -> None:
        """Records that the attempt ended without its usage; ``estimated`` stands for it."""
        self.estimated = total_tokens((estimated, self.estimated))
        self.usage = None

    @property
    def is_out_of_tokens(self) -> bool:
        """Whether the model was stopped at a number of tokens."""
        return find_ending(self.finish_reason) == "length"

    @property
    def is_cut_off(self) -> bool:
        """Whether the model was stopped before the end of its reply."""
        return find_ending(self.finish_reason) != "whole"

    @property
    def text(self) -> str:
        """The text of the attempt so far, as the model wrote it."""
        return "".join(self.pieces)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of its last attempt that went into reasoning: as reported, or estimated from the text."""
        details = self.usage.get("output_token_details") if self.usage else None
        reported = details.get("reasoning") if details else None
        return reported or (num_tokens(self.reasoning) if self.reasoning else 0)

    def trace(self) -> CallTrace:
        """The call as it goes into the answer's trace."""
        return cast("CallTrace", dict(zip(_TRACED, _get_traced(self), strict=True)))
