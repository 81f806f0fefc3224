"""The parts of an answer while they are written, its calls, and the trace that is made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from operator import attrgetter
from typing import Any, Literal, NamedTuple, cast

from langchain_core.messages.ai import UsageMetadata

from sot_chains.calls import usage
from sot_chains.calls.options import AnswerOptions
from sot_chains.calls.trace import Call, Failure, PointTrace, SotTrace, Status, StoppedBy
from sot_chains.calls.usage import NO_TOKENS, Tokens
from sot_chains.outline.skeleton import Point, Skeleton


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
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # by the model, or ended
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, status: Status, reason: str | None = None) -> None:
        """Ends it with the text it has."""
        self.status, self.reason = status, reason
        self.begun.set()
        self._ended.set()

    async def wait(self) -> None:
        """Waits until it has ended."""
        await self._ended.wait()

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


@dataclass(slots=True)
class AnswerRecord:
    """The calls, the parts and the route of one answer."""

    options: AnswerOptions
    calls: list[Call] = field(default_factory=list)  # in the order they were begun
    parts: list[Part] = field(default_factory=list)  # the points and the conclusion, or the plain answer
    skeleton: Skeleton = field(default_factory=Skeleton)  # as far as it is known
    skeleton_call: Call | None = None
    skeleton_reply: str | None = None  # once it is whole
    is_graph: bool = False  # whether points may build on each other because the router, or the user, says so
    is_outlined: bool = False  # whether the route is known, and all points with it
    cut: str = ""  # why the outline is not whole
    has_failed: bool = False  # whether the answer ended with an error
    route_reason: str = ""
    seconds: float = 0.0
    first_text_seconds: float | None = None

    def begin_plain(self, reason: str) -> None:
        """Drops all parts, because the answer is to be plain. Their calls stay recorded."""
        self.parts.clear()
        self.route_reason, self.is_outlined, self.first_text_seconds = reason, True, None

    @property
    def is_plain(self) -> bool:
        """Whether the model answers in one piece."""
        return bool(self.parts) and self.parts[0].kind == "plain"

    @property
    def has_any(self) -> bool:
        """Whether any point, or the plain answer, has text, or is complete without."""
        own = [part for part in self.parts if part.kind != "conclusion"]
        return any(part.status == "complete" or part.text.strip() for part in own)

    def end_parts(self, reason: str) -> None:
        """Ends the parts that have not ended with the text they have."""
        for part in self.parts:
            if part.status is None:
                part.end("cut" if part.pieces else "failed", reason)

    def particulars(self, message_id: str) -> dict[str, Any]:
        """What the finished message carries besides its text."""
        trace = self.trace()
        names = filter(None, map(attrgetter("model_name"), reversed(self.calls)))
        metadata = {"model_name": next(names, self.options.provider.model_name), "sot": trace}
        return {"id": message_id, "usage_metadata": trace["usage"], "response_metadata": metadata}

    def trace(self) -> SotTrace:
        """The record as plain values. Written as one loop over parts: an answer has many of them."""
        plain: Part | None = None
        conclusion: PointTrace | None = None
        points: list[PointTrace] = []
        failures: list[Failure] = []
        is_graph = self.is_graph
        for part in self.parts:
            traced: Any = part.trace()
            if part.point:
                points.append(traced)
                is_graph = is_graph or bool(part.needs)
            elif part.kind == "plain":
                plain = part
                traced["label"] = "plain answer"
            else:
                conclusion = traced
            if traced["status"] != "complete" and (part.status or not plain):
                failures.append(cast("Failure", {name: traced[name] for name in Failure.__annotations__}))
        call, by_stage = self.skeleton_call, self._usages()
        if self.cut:
            failures.append(Failure(number=0, label="outline", status="cut", reason=self.cut))
        estimates = list(filter(None, map(attrgetter("estimated"), self.calls)))
        estimated = usage.total_tokens(estimates) if estimates else None
        options = self.options
        price = usage.price_for(options.provider.model_name, options.prices) if options.prices else None
        tiers = self._tiers() if any(map(attrgetter("tier"), self.calls)) else {}
        as_plain = self._as_plain() if price else NO_TOKENS
        stages = dict(zip(by_stage, map(usage.count_tokens, by_stage.values()), strict=True))
        skeleton_seconds = call.end_seconds - call.start_seconds if call else 0.0
        return SotTrace(
            route="plain" if plain else "graph" if is_graph else "sot",
            route_reason=self.route_reason,
            is_complete=not failures and not self.has_failed,
            failures=failures,
            skeleton=list(map(attrgetter("text"), self.skeleton.points)),
            skeleton_reply=self.skeleton_reply,
            skeleton_call=call.trace() if call else None,
            points=points,
            conclusion=conclusion,
            plain_call=plain.call.trace() if plain and plain.call else None,
            plain_stopped_by=plain.stopped_by if plain else None,
            seconds=self.seconds,
            first_text_seconds=self.first_text_seconds,
            # At most the whole time, which is less where points are written while the outline still is.
            critical_path_seconds=min(self.seconds, skeleton_seconds + self._longest_chain()),
            num_calls=sum(map(bool, map(attrgetter("num_requests"), self.calls))),
            num_requests=sum(map(attrgetter("num_requests"), self.calls)),
            usage=usage.total_usage((*by_stage.values(), estimated and usage.as_usage(estimated))),
            cost=usage.compute_cost(stages, estimated, price, tiers, as_plain),
        )

    def _usages(self) -> dict[str, UsageMetadata | None]:
        """The reported usage of the calls, by stage."""
        stages: dict[str, list[UsageMetadata | None]] = {}
        for call in self.calls:
            if call.num_requests:
                stages.setdefault(call.stage, []).append(call.usage)
        return dict(zip(stages, map(usage.total_usage, stages.values()), strict=True))

    def _tiers(self) -> dict[str, Tokens]:
        """The tokens of calls in other tiers than the standard one."""
        tiers: dict[str, Tokens] = {}
        for call in self.calls:
            if (tier := usage.tier_name(call.tier)) and call.num_requests:
                counts = tiers.get(tier), usage.count_tokens(call.usage), call.estimated
                tiers[tier] = usage.total_tokens(counts)
        return tiers

    def _as_plain(self) -> Tokens:
        """What a plain answer of this length would take: the shortest prompt of a call, and all text."""
        counts = [usage.count_tokens(call.usage) for call in self.calls if call.usage]
        num_in = min((one["input_tokens"] for one in counts), default=0)
        num_out = sum(usage.count_tokens(one.call.usage)["output_tokens"] for one in self.parts if one.call)
        return {**NO_TOKENS, "input_tokens": num_in, "output_tokens": num_out}

    def _longest_chain(self) -> float:
        """Seconds of the longest chain of parts that build on each other."""
        ends: dict[Part, float] = {}
        # No recursion: a graph may be long.
        for part in TopologicalSorter({part: part.needs for part in self.parts}).static_order():
            took = part.call.end_seconds - part.call.start_seconds if part.call else 0.0
            ends[part] = took + max([ends[needed] for needed in part.needs], default=0.0)
        return max(ends.values(), default=0.0)
