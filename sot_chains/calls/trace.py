"""What an answer records of its making, found in ``response_metadata["sot"]``.

Plain dicts of JSON values, so that it survives every serialiser. Times are in seconds since the answer was
begun. No key is called ``index``: LangChain merges dicts of streamed messages that share one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, TypedDict, cast

from langchain_core.messages.ai import UsageMetadata, add_usage

from sot_chains.calls.usage import Cost, Tokens, count_tokens, num_tokens, total_tokens
from sot_chains.calls.windows import Reservation
from sot_chains.providers.base import Delta, find_ending

# The text ends before its end; there is none; the point was left out of the answer because it failed.
Status = Literal["complete", "cut", "failed", "omitted"]
# Another point began; the text repeated itself; it was long enough at the end of a sentence.
StoppedBy = Literal["overrun", "loop", "length"]


class CallTrace(TypedDict):
    """One model call, with all its attempts. Times are those of the last one."""

    start_seconds: float  # when it was sent, after any wait for limits
    first_text_seconds: float | None  # None if it wrote nothing
    end_seconds: float
    usage: UsageMetadata | None  # None if it was not reported
    finish_reason: str | None
    num_requests: int
    estimated: Tokens | None  # of attempts whose usage did not arrive; part of the answer's cost
    reasoning_tokens: int  # of the output, those that went into reasoning, which is not part of the text


_TRACED = tuple(CallTrace.__annotations__)
_get_traced = attrgetter(*_TRACED)


class PointTrace(CallTrace):
    """One point, or the conclusion, and the call that wrote it."""

    number: int
    label: str
    text: str
    status: Status
    reason: str | None  # why it is not complete
    stopped_by: StoppedBy | None  # why its text was ended before the model ended it
    is_resumed: bool  # written for an earlier answer; what it took then is not part of this one's usage
    needs: list[int]  # the numbers of the points that were written before it, since it builds on them


class Failure(TypedDict):
    """A point that is not, or not wholly, in the answer."""

    number: int  # 0 for what is no point
    label: str  # of the point, or "outline", "plain answer", "conclusion"
    status: Status
    reason: str


class SotTrace(TypedDict):
    """How one answer came about. Pass it as ``resume=`` to have what failed, or was cut, written again."""

    route: Literal["sot", "graph", "plain"]  # "graph" where points build on each other, or were to
    route_reason: str
    is_complete: bool  # whether nothing failed, was cut or was left out
    failures: list[Failure]  # what did, and why; what is no point has the number 0
    skeleton: list[str]  # the headings of the points; on the plain route, of what little was found
    skeleton_reply: str | None  # None if the model was not asked
    skeleton_call: CallTrace | None
    points: list[PointTrace]  # in reading order
    conclusion: PointTrace | None  # written with all points in view
    plain_call: CallTrace | None
    plain_stopped_by: StoppedBy | None
    seconds: float  # from beginning to end
    first_text_seconds: float | None  # when the first text could be read, without headings
    # What no amount of parallelism saves: the skeleton and then the longest chain of points that build on
    # each other, or the whole time if that is less.
    critical_path_seconds: float
    num_calls: int
    num_requests: int  # attempts made for the calls
    usage: UsageMetadata | None  # of all calls, as reported or else as estimated; None if none was answered
    cost: Cost


_STANDARD_TIERS = frozenset({"", "auto", "default", "standard", "standard_only"})


@dataclass(slots=True)
class Call:
    """A model call while it is made, over all its attempts."""

    name: str  # of its run
    stage: Literal["skeleton", "points", "plain"]  # to which its cost belongs
    start_seconds: float = 0.0
    first_text_seconds: float | None = None
    end_seconds: float = 0.0
    usage: UsageMetadata | None = None
    finish_reason: str | None = None
    model_name: str | None = None
    num_requests: int = 0
    estimated: Tokens | None = None
    reserved: Reservation | None = None  # of the limits of the account
    tier: str | None = None  # that was asked for, or that served it
    reply_start: str | None = None  # what the reply of this attempt was begun with, if it was
    pieces: list[str] = field(default_factory=list)  # the raw text of this attempt
    reasoning: str = ""  # of this attempt, in the text or reported beside it
    has_our_bound: bool = False  # whether the profile, and not the user, bounds its tokens
    is_read: bool = False  # whether somebody has seen its text, so that it cannot be discarded
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # set once something has come

    def begin(self, now_seconds: float) -> None:
        """Records that an attempt begins now, and its request is sent."""
        self.num_requests += 1
        self.start_seconds = self.end_seconds = now_seconds
        self.first_text_seconds = self.usage = self.finish_reason = None
        self.pieces, self.reasoning = [], ""

    def note(self, delta: Delta, now_seconds: float) -> None:
        """Records what ``delta`` says."""
        self.begun.set()
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
            if isinstance(tier := metadata.get("service_tier"), str):
                self.tier = None if tier in _STANDARD_TIERS else tier

    def cut(self, prompt: Tokens) -> None:
        """Records that the attempt ended before its usage was reported; ``prompt`` is an estimate."""
        estimated = count_tokens(self.usage) if self.usage and self.usage["input_tokens"] else prompt
        estimated = {**estimated, "output_tokens": num_tokens(self.text) if self.pieces else 0}
        self.estimated = total_tokens((estimated, self.estimated))
        self.usage = None

    @property
    def is_out_of_tokens(self) -> bool:
        """Whether the model was stopped at a number of tokens."""
        return find_ending(self.finish_reason) == "length"

    @property
    def is_cut_off(self) -> bool:
        """Whether the model was stopped before the end of its reply."""
        return find_ending(self.finish_reason) not in ("whole", "calls")

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


@contextmanager
def span(name: str, model: str, calls: Sequence[Call]) -> Iterator[None]:
    """Traces a block that makes ``calls`` as a span, if the application has set OpenTelemetry's provider.

    Who sets one has imported the package, so it is looked up here and never imported. Names follow the
    conventions for generative AI: https://opentelemetry.io/docs/specs/semconv/gen-ai/.
    """
    if (trace := sys.modules.get("opentelemetry.trace")) is None:
        yield
        return
    known: Any = {"gen_ai.operation.name": "chat", "gen_ai.request.model": model}
    with trace.get_tracer("sot_chains").start_as_current_span(f"{name} {model}", attributes=known) as current:
        try:
            yield
        finally:
            if current.is_recording():
                spent = total_tokens(n for one in calls for n in (count_tokens(one.usage), one.estimated))
                known = {f"gen_ai.usage.{name}": spent[name] for name in ("input_tokens", "output_tokens")}
                names, reasons = map(attrgetter("model_name"), calls), map(attrgetter("finish_reason"), calls)
                known["gen_ai.response.model"] = next(filter(None, names), model)
                known["gen_ai.response.finish_reasons"] = [*filter(None, reasons)]
                current.set_attributes(known)
