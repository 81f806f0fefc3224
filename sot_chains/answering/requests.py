"""The requests of one answer, as messages: what is asked, what the reply begins with, what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import TypeVar

from langchain_core.messages import AIMessage, BaseMessage

from sot_chains.answering.point_tasks import PointTask
from sot_chains.calls.options import ReplyBounds, SotOptions
from sot_chains.providers.base import SharedPrefix
from sot_chains.providers.vendor import VendorProvider
from sot_chains.text.conversation import Conversation
from sot_chains.text.skeleton import Point, Skeleton

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """The second stage.

    Attributes:
        points: What to write; none for a plain answer.
        points_per_call: How many of them one call writes.
        change: What a budget made of the plan, in words; ``None`` if nothing.
    """

    points: tuple[Point, ...]
    points_per_call: int
    change: str | None = None

    def groups(self) -> list[Sequence[Point]]:
        """The points of each call."""
        return in_groups(self.points, self.points_per_call)

    def smaller(self) -> list[Plan]:
        """Ever cheaper plans: more points in one call, then fewer points, then none."""
        num, size = len(self.points), self.points_per_call
        plans: list[Plan] = []
        while size < num:
            size = min(num, size * 2)
            plans.append(Plan(self.points, size, f"{size} points in one call, for the budget"))
        plans += [
            Plan(self.points[:fewer], fewer, f"{fewer} of {num} points, for the budget")
            for fewer in range(num - 1, 1, -1)
        ]
        return [*plans, Plan((), 1, "a plain answer, for the budget")]


def in_groups(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """``items`` in groups of ``size``, the last of which may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]


# A small model goes on to the points after its own, or repeats itself: its point is one short line.
_POINT = ReplyBounds(stop="\n", max_tokens=120)
_OUTLINE = ReplyBounds(stop="\n\n", max_tokens=160)


class Requests:
    """Makes the messages of each stage.

    Attributes:
        templates: The wording, in the language of the question.
        skeleton_reply_start: What the last skeleton request made began the reply with.
    """

    def __init__(self, method: SotOptions, conversation: Conversation) -> None:
        self._conversation = conversation
        self._is_cached = isinstance(method.provider, VendorProvider)
        self.templates = method.prompts.for_question(conversation.question)
        # Asked of the model itself: a user may know that another one continues replies, but one that is
        # stronger needs no examples, and some vendors refuse a stop string that is a line's end.
        self._is_small = method.provider.supports_prefill and not self._is_cached
        self.skeleton_reply_start: str | None = None

    def skeleton(self, *, prefill: bool, written: str = "") -> list[BaseMessage]:
        """Asks for the outline."""
        self.skeleton_reply_start = self.templates.skeleton_prefill if prefill else None
        question = self._conversation.question
        if self._shows_examples(prefill=prefill):
            request = self.templates.skeleton_after_examples.format(question=question)
            examples = self.templates.skeleton_examples()
        else:
            request, examples = self.templates.skeleton_request(question, prefill=prefill), []
        return self._asking(request, self.skeleton_reply_start, written, examples)

    def points(
        self, skeleton: Skeleton, points: Sequence[Point], *, prefill: bool, written: str = ""
    ) -> list[BaseMessage]:
        """Asks for one point or several to be written out."""
        start = self.templates.expansion_reply_start(points[0]) if prefill else None
        request = self._request_for(skeleton, points, prefill=prefill)
        shows_examples = len(points) == 1 and self._shows_examples(prefill=prefill)
        examples = self.templates.expansion_examples() if shows_examples else []
        return self._asking(request, start, written, examples)

    def plain(self, *, prefill: bool, written: str = "") -> list[BaseMessage]:
        """Asks what the user asks."""
        messages = list(self._conversation.messages)
        return [*messages, AIMessage(content=written)] if prefill and written else messages

    def unit(
        self, positions: list[int], points: Sequence[Point], skeleton: Skeleton, prefix: SharedPrefix | None
    ) -> PointTask:
        """The unit that writes ``points``."""
        alone = None
        if len(points) > 1:

            def alone(position: int, point: Point) -> PointTask:
                return self.unit([position], [point], skeleton, None)

        request = partial(self.points, skeleton, points)
        is_bound = len(points) == 1 and self._shows_examples(prefill=True)
        return PointTask(positions, points, request, prefix, _POINT if is_bound else None, alone=alone)

    def skeleton_task(self) -> PointTask:
        """The unit that writes the outline, which ends at a blank line."""
        bounds = _OUTLINE if self._shows_examples(prefill=True) else None
        return PointTask([], (), self.skeleton, self.whole_prefix(), bounds)

    def whole_prefix(self) -> SharedPrefix | None:
        """What all requests share: what stands before the question."""
        return SharedPrefix(0, self._key) if self._is_cached else None

    def shared_prefix(self, skeleton: Skeleton, groups: Sequence[Sequence[Point]]) -> SharedPrefix | None:
        """What the requests for ``groups`` of points have in common, for providers that cache it."""
        if not self._is_cached or len(groups) < 2:
            return None
        first, last = (
            self._request_for(skeleton, points, prefill=True) for points in (groups[0], groups[-1])
        )
        differing = (
            place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other
        )
        return SharedPrefix(next(differing, min(len(first), len(last))), self._key)

    def plain_share(self) -> float:
        """How much shorter than the skeleton's request the user's own is, by characters."""
        own = sum(len(str(message.text)) for message in self._conversation.messages)
        question = self._conversation.question
        request = len(
            self.templates.skeleton_request(question, prefill=self.skeleton_reply_start is not None)
        )
        return own / max(1, own - len(question) + request)

    def _request_for(self, skeleton: Skeleton, points: Sequence[Point], *, prefill: bool) -> str:
        question = self._conversation.question
        if len(points) == 1:
            return self.templates.expansion_request(question, skeleton, points[0], prefill=prefill)
        return self.templates.several_request(question, skeleton, points, prefill=prefill)

    def _shows_examples(self, *, prefill: bool) -> bool:
        """Whether earlier turns show what is asked for: to models that continue a reply, but no vendor's.

        Those of the vendors are strong enough without, and bill every token they read.
        """
        return prefill and self._is_small and bool(self.templates.examples)

    def _asking(
        self, request: str, start: str | None, written: str, examples: Sequence[tuple[str, str]]
    ) -> list[BaseMessage]:
        reply_start = None if start is None else start + written
        return self._conversation.asking(request, reply_start=reply_start, examples=examples)

    @cached_property
    def _key(self) -> str:
        digest = blake2b(digest_size=12)
        for message in self._conversation.messages:
            digest.update(repr(message.content).encode())
        return f"sot-{digest.hexdigest()}"
