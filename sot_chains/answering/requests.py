"""The requests of one answer, as messages: what is asked, what the reply begins with, what they share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from hashlib import blake2b

from langchain_core.messages import AIMessage, BaseMessage

from sot_chains.calls.model_call import Request
from sot_chains.calls.options import ReplyBounds, SotOptions
from sot_chains.providers.base import SharedPrefix
from sot_chains.providers.vendor import VendorProvider
from sot_chains.text.conversation import Conversation
from sot_chains.text.skeleton import Point, Skeleton

# A small model continues with the points after its own, or repeats itself: its point is one short line.
_POINT = ReplyBounds(stop="\n", max_tokens=120)
_OUTLINE = ReplyBounds(stop="\n\n", max_tokens=160)


class Requests:
    """Makes the requests of both stages.

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
        self._prefix: tuple[Skeleton, SharedPrefix | None] | None = None

    def skeleton(self) -> Request:
        """Asks for the outline, which ends at a blank line."""
        prefix = SharedPrefix(0, self._key) if self._is_cached else None  # what stands before the question
        bounds = _OUTLINE if self._shows_examples(prefill=True) else None
        return Request(self._skeleton_messages, None, prefix, bounds)

    def point(self, skeleton: Skeleton, point: Point, *, is_whole: bool) -> Request:
        """Asks for one point to be written out.

        Args:
            skeleton: The outline shown with it.
            point: The point.
            is_whole: Whether ``skeleton`` is the whole outline, so that all points show the same one.
        """
        prefix = self._shared_prefix(skeleton) if is_whole else None
        bounds = _POINT if self._shows_examples(prefill=True) else None
        messages = partial(self._point_messages, skeleton, point)
        return Request(messages, point, prefix, bounds, skeleton=skeleton)

    def plain(self) -> Request:
        """Asks what the user asks."""
        return Request(self._plain_messages)

    def plain_share(self) -> float:
        """How much shorter than the skeleton's request the user's own is, by characters."""
        own = sum(len(str(message.text)) for message in self._conversation.messages)
        question = self._conversation.question
        request = len(
            self.templates.skeleton_request(question, prefill=self.skeleton_reply_start is not None)
        )
        return own / max(1, own - len(question) + request)

    def _skeleton_messages(self, *, prefill: bool, written: str = "") -> list[BaseMessage]:
        self.skeleton_reply_start = self.templates.skeleton_prefill if prefill else None
        question = self._conversation.question
        if self._shows_examples(prefill=prefill):
            request = self.templates.skeleton_after_examples.format(question=question)
            examples = self.templates.skeleton_examples()
        else:
            request, examples = self.templates.skeleton_request(question, prefill=prefill), []
        return self._asking(request, self.skeleton_reply_start, written, examples)

    def _point_messages(
        self, skeleton: Skeleton, point: Point, *, prefill: bool, written: str = ""
    ) -> list[BaseMessage]:
        start = self.templates.expansion_reply_start(point) if prefill else None
        request = self.templates.expansion_request(
            self._conversation.question, skeleton, point, prefill=prefill
        )
        examples = self.templates.expansion_examples() if self._shows_examples(prefill=prefill) else []
        return self._asking(request, start, written, examples)

    def _plain_messages(self, *, prefill: bool, written: str = "") -> list[BaseMessage]:
        messages = list(self._conversation.messages)
        return [*messages, AIMessage(content=written)] if prefill and written else messages

    def _shared_prefix(self, skeleton: Skeleton) -> SharedPrefix | None:
        """What the requests for the points of ``skeleton`` have in common, for providers that cache it."""
        if not self._is_cached or len(skeleton) < 2:
            return None
        if self._prefix is None or self._prefix[0] is not skeleton:
            question = self._conversation.question
            first, last = (
                self.templates.expansion_request(question, skeleton, point, prefill=True)
                for point in (skeleton.points[0], skeleton.points[-1])
            )
            self._prefix = skeleton, SharedPrefix(_common_length(first, last), self._key)
        return self._prefix[1]

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


def _common_length(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginnings. By halves, since it is often asked."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
