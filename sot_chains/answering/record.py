"""The record of one answer while it is written, and the trace that is made of it."""

from __future__ import annotations

from functools import reduce
from graphlib import TopologicalSorter
from typing import Any

from langchain_core.messages.ai import UsageMetadata

from sot_chains.answering.state import Part
from sot_chains.calls.options import AnswerOptions
from sot_chains.calls.trace import Call, Failure, SotTrace, total_usage
from sot_chains.calls.usage import Cost, added, cost_of, tokens_of
from sot_chains.outline.skeleton import Skeleton


class AnswerRecord:
    """The calls, the parts and the route of one answer.

    Attributes:
        calls: Every call, in the order they were begun.
        parts: What is shown: the points and the conclusion, or the plain answer.
        skeleton: The outline as far as it is known.
        skeleton_call: The call that writes the outline.
        skeleton_reply: The whole reply to the skeleton request.
        is_graph: Whether points may build on each other because the router, or the user, says so.
        is_outlined: Whether the route is known, and all points with it.
        is_cut: Whether the outline is not whole.
        router_reason: Why the router has chosen Skeleton-of-Thought, if one was asked.
        has_failed: Whether the answer ended with an error.
        plain_share: What a plain answer would have read of what the skeleton's call did, by characters.
    """

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self.calls: list[Call] = []
        self.parts: list[Part] = []
        self.skeleton = Skeleton()
        self.skeleton_call: Call | None = None
        self.skeleton_reply: str | None = None
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

    def note_outline(self, reply: str) -> None:
        """Records that the outline is whole, and the route that follows from it."""
        because = f", {self.router_reason}" if self.router_reason else ""
        self.skeleton_reply = reply
        self.route_reason = f"the skeleton has {len(self.skeleton)} points{because}"

    def cut_outline(self, reason: str) -> None:
        """Records that the outline is not whole: the answer has the points that were begun."""
        self.is_cut, self.route_reason = True, reason
        self.skeleton = Skeleton(tuple(part.point for part in self.parts if part.point))

    def begin_plain(self, reason: str) -> Part:
        """Drops all parts, because the answer is to be plain. Their calls stay recorded."""
        self.parts.clear()
        self.route_reason, self.is_outlined, self.first_text_seconds = reason, True, None
        return Part(kind="plain")

    @property
    def is_plain(self) -> bool:
        """Whether the model answers in one piece."""
        return bool(self.parts) and self.parts[0].kind == "plain"

    @property
    def has_any(self) -> bool:
        """Whether any point, or the plain answer, has text, or is complete without."""
        parts = [part for part in self.parts if part.kind != "conclusion"]
        return any(part.pieces or part.status == "complete" for part in parts)

    def end_parts(self, reason: str) -> None:
        """Ends the parts that have not ended with the text they have."""
        for part in self.parts:
            if part.status is None:
                part.end("cut" if part.pieces else "failed", reason)

    def fail(self, reason: str, seconds: float) -> None:
        """Records that the answer ended with an error."""
        self.has_failed, self.seconds = True, seconds
        self.end_parts(reason)

    @property
    def model_name(self) -> str:
        """What the server calls the model, or else what we do."""
        names = [call.model_name for call in self.calls if call.model_name]
        return names[-1] if names else self._options.provider.model_name

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
        parts = {part.kind: part for part in self.parts}
        plain, conclusion = parts.get("plain"), parts.get("conclusion")
        points = [part.trace() for part in self.parts if part.point]
        concluded = conclusion.trace() if conclusion else None
        failures = [
            Failure(number=p["number"], label=p["label"], status=p["status"], reason=p["reason"] or "")
            for p in (*points, *([concluded] if concluded else ()))
            if p["status"] != "complete"
        ]
        if plain and plain.status and plain.status != "complete":
            failures = [
                Failure(number=0, label="plain answer", status=plain.status, reason=plain.reason or "")
            ]
        is_graph = self.is_graph or any(part.point and part.needs for part in self.parts)
        call = self.skeleton_call
        begun = [one for one in self.calls if one.is_begun]
        skeleton_seconds = call.end_seconds - call.start_seconds if call else 0.0
        return SotTrace(
            route="plain" if plain else "graph" if is_graph else "sot",
            route_reason=self.route_reason,
            is_complete=not failures and not self.is_cut and not self.has_failed,
            failures=failures,
            skeleton=[point.text for point in self.skeleton],
            skeleton_reply=self.skeleton_reply,
            skeleton_call=call.trace() if call else None,
            points=points,
            conclusion=concluded,
            plain_call=plain.call.trace() if plain and plain.call else None,
            plain_stopped_by=plain.stopped_by if plain else None,
            seconds=self.seconds,
            first_text_seconds=self.first_text_seconds,
            # At most the whole time, which is less where points are written while the outline still is.
            critical_path_seconds=min(self.seconds, skeleton_seconds + self._longest_chain()),
            num_calls=len(begun),
            num_requests=sum(one.num_requests for one in begun),
            usage=total_usage(begun),
            cost=self._cost(begun, call.usage if call and points else None),
        )

    def _cost(self, begun: list[Call], outline: UsageMetadata | None) -> Cost:
        stages: dict[str, list[UsageMetadata | None]] = {}
        for call in begun:
            stages.setdefault(call.stage, []).append(call.usage)
        estimates = [call.estimated for call in self.calls if call.estimated]
        return cost_of(
            {stage: tokens_of(usages) for stage, usages in stages.items()},
            reduce(added, estimates) if estimates else None,
            self._options.price,
            round(outline["input_tokens"] * self.plain_share) if outline else None,
        )

    def _longest_chain(self) -> float:
        """Seconds of the longest chain of parts that build on each other."""
        seconds = {
            id(part): part.call.end_seconds - part.call.start_seconds if part.call else 0.0
            for part in self.parts
        }
        if any(part.needs for part in self.parts):
            needs = {id(part): [id(needed) for needed in part.needs] for part in self.parts}
            for part in TopologicalSorter(needs).static_order():  # no recursion: a graph may be long
                seconds[part] += max((seconds[needed] for needed in needs[part]), default=0.0)
        return max(seconds.values(), default=0.0)
