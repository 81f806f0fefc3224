"""The record of one answer while it is written, and the trace that is made of it."""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import Any, Literal

from langchain_core.messages.ai import UsageMetadata

from sot_chains.calls.options import SotOptions
from sot_chains.calls.trace import Call, Failure, PointState, SotTrace, total_usage
from sot_chains.calls.usage import Tokens, added, cost_of, tokens_of
from sot_chains.outline.skeleton import Skeleton


class AnswerRecord:
    """The calls, the places and the route of one answer.

    Attributes:
        calls: Every call, in the order they were begun.
        places: What is shown: a place for each point, or one for the plain answer.
        conclusion: The place that is written with all points in view.
        is_plain: Whether the model answers in one piece.
        is_graph: Whether points may build on each other because the router, or the user, says so.
        is_outlined: Whether the route is known, and all points with it.
        is_cut: Whether the outline is not whole.
        router_reason: Why the router has chosen Skeleton-of-Thought, if one was asked.
        has_failed: Whether the answer ended with an error.
        plain_share: The question's share of the skeleton request, by characters: what a plain answer would
            have read of what the skeleton's call did.
    """

    def __init__(self, method: SotOptions) -> None:
        self._method = method
        self.calls: list[Call] = []
        self.places: list[PointState] = []
        self.conclusion: PointState | None = None
        self.skeleton = Skeleton()
        self.skeleton_call: Call | None = None
        self.skeleton_reply: str | None = None
        self.skeleton_seconds = 0.0
        self.is_plain = False
        self.is_graph = False
        self.is_outlined = False
        self.is_cut = False
        self.has_failed = False
        self.route_reason = ""
        self.router_reason = ""
        self.seconds = 0.0
        self.first_text_seconds: float | None = None
        self.plain_share = 0.0

    def begin(self, call: Call) -> Call:
        """Takes ``call`` into the record."""
        self.calls.append(call)
        return call

    def note_outline(self, reply: str, skeleton: Skeleton, fault: str | None) -> None:
        """Records the finished outline, and the route that follows from it or from its ``fault``."""
        self.skeleton, self.skeleton_reply = skeleton, reply
        if self.places and len(skeleton) < 2:  # begun by an attempt that failed; the next one is no outline
            self.cut_outline("the outline broke off, and was none when it was asked for again")
        elif fault and not self.places:
            self.route_reason = fault
        else:
            because = f", {self.router_reason}" if self.router_reason else ""
            self.route_reason = f"the skeleton has {len(skeleton)} points{because}"

    def cut_outline(self, reason: str) -> None:
        """Records that the outline is not whole: the answer has the points that were begun."""
        self.is_cut, self.route_reason = True, reason
        self.skeleton = Skeleton(tuple(place.point for place in self.places if place.point))

    def begin_again(self, reason: str) -> None:
        """Drops all places, because the answer is to be plain after all. Their calls stay recorded."""
        self.places.clear()
        self.route_reason, self.is_outlined, self.first_text_seconds = reason, True, None

    @property
    def _route_of_points(self) -> Literal["sot", "graph"]:
        is_graph = self.is_graph or any(place.point and place.needs for place in self.places)
        return "graph" if is_graph else "sot"

    @property
    def has_any(self) -> bool:
        """Whether any point, or the plain answer, has text, or is complete without."""
        places = [place for place in self.places if not place.part]
        return any(place.pieces or place.status == "complete" for place in places)

    def end_places(self, reason: str) -> None:
        """Ends the places that have not ended with the text they have."""
        for place in self.places:
            if not place.is_ended:
                place.end("cut" if place.pieces else "failed", reason)

    def fail(self, reason: str, seconds: float) -> None:
        """Records that the answer ended with an error."""
        self.has_failed, self.seconds = True, seconds
        self.end_places(reason)

    @property
    def model_name(self) -> str:
        """What the server calls the model, or else what we do."""
        names = [call.model_name for call in self.calls if call.model_name]
        return names[-1] if names else self._method.provider.model_name

    def particulars(self, message_id: str) -> dict[str, Any]:
        """What the finished message carries besides its text."""
        trace = self.trace()
        return {
            "id": message_id,
            "usage_metadata": trace["usage"],
            "response_metadata": {"model_name": self.model_name, "sot": trace},
        }

    def trace(self) -> SotTrace:
        """The record as plain values."""
        points = [] if self.is_plain else [place.trace() for place in self.places if place.point]
        conclusion = self.conclusion.trace() if self.conclusion in self.places else None
        failures = [
            Failure(number=p["number"], label=p["label"], status=p["status"], reason=p["reason"] or "")
            for p in (*points, *([conclusion] if conclusion else ()))
            if p["status"] != "complete"
        ]
        plain = self.places[0] if self.is_plain and self.places else None
        if plain and plain.status and plain.status != "complete":
            failures = [
                Failure(number=0, label="plain answer", status=plain.status, reason=plain.reason or "")
            ]
        skeleton_call = self.skeleton_call
        stages: dict[str, list[UsageMetadata | None]] = {}
        num_calls = num_requests = 0
        for call in self.calls:
            if call.is_begun:
                num_calls += 1
                num_requests += call.num_requests
                stages.setdefault(call.stage, []).append(call.usage)
        plain_input = None
        if points and skeleton_call and skeleton_call.usage:
            plain_input = round(skeleton_call.usage["input_tokens"] * self.plain_share)
        return SotTrace(
            route="plain" if self.is_plain else self._route_of_points,
            route_reason=self.route_reason,
            is_complete=not failures and not self.is_cut and not self.has_failed,
            failures=failures,
            skeleton=[point.text for point in self.skeleton],
            skeleton_reply=self.skeleton_reply,
            skeleton_call=skeleton_call.trace() if skeleton_call else None,
            points=points,
            conclusion=conclusion,
            plain_call=plain.call.trace() if plain and plain.call else None,
            plain_stopped_by=plain.stopped_by if plain else None,
            seconds=self.seconds,
            first_text_seconds=self.first_text_seconds,
            critical_path_seconds=min(
                self.seconds,  # which is less where points are written while the outline still is
                self.skeleton_seconds + self._longest_chain(),
            ),
            num_calls=num_calls,
            num_requests=num_requests,
            usage=total_usage(self.calls),
            cost=cost_of(
                {stage: tokens_of(usages) for stage, usages in stages.items()},
                self._estimated(),
                self._method.price,
                plain_input,
            ),
        )

    def _longest_chain(self) -> float:
        """Seconds of the longest chain of places that build on each other."""
        by_id = {id(place): place for place in self.places}
        needs = {number: [id(needed) for needed in place.needs] for number, place in by_id.items()}
        seconds: dict[int, float] = {}
        for number in TopologicalSorter(needs).static_order():  # no recursion: a graph may be long
            call = by_id[number].call
            before = max((seconds[needed] for needed in needs[number]), default=0.0)
            seconds[number] = before + (call.seconds if call else 0.0)
        return max(seconds.values(), default=0.0)

    def _estimated(self) -> Tokens | None:
        """What calls took that were cut before their usage arrived, if there were any."""
        total: Tokens | None = None
        for call in self.calls:
            if call.estimated is not None:
                total = added(call.estimated, total)
        return total
