"""The requests of one answer, as messages: what is asked, what the reply begins with, what they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage

from sot_chains.calls.model_call import Request
from sot_chains.calls.options import ReplyBounds, SotOptions
from sot_chains.calls.trace import PointState
from sot_chains.outline.reader import OutlineReader, outline_grammar
from sot_chains.outline.skeleton import Point, Skeleton
from sot_chains.outline.thoughts import GRAPH_EXAMPLES, Thought
from sot_chains.prompts.conversation import Conversation
from sot_chains.prompts.examples import Detail
from sot_chains.prompts.templates import common_length, language_of
from sot_chains.providers.base import SharedPrefix
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.providers.vendor import TINY_PARAMETERS, VendorProvider

# Where the text of a point ends, by the level of detail. A small model is stopped at the end of the line,
# since it continues with the points after its own; its tokens are bounded, since it may repeat itself.
_SMALL_POINT: dict[Detail, ReplyBounds] = {
    "brief": ReplyBounds(stop=("\n",), max_tokens=60, max_words=8),
    "normal": ReplyBounds(stop=("\n",), max_tokens=125, max_words=65),
    "full": ReplyBounds(stop=(), max_tokens=400, max_words=110),
}
_POINT: dict[Detail, ReplyBounds] = {
    "brief": ReplyBounds(max_words=30),
    "normal": ReplyBounds(max_words=90),
    "full": ReplyBounds(max_words=300),
}
_HEADING_WORDS, _MARK_WORDS = 8, 4
# A tiny model answers at length or in loops, and ends a point after anything from ten tokens to ninety. The
# longest point decides how long the answer takes, so that the others may as well be as long. Models above
# that size answer plainly in some three hundred tokens, so that their points are fewer and shorter.
_TINY_HEADINGS, _HEADINGS = 8, 6
_MIN_TOKENS: dict[Detail, int] = {"brief": 0, "normal": 80, "full": 0}
_LARGER_POINT = ReplyBounds(stop=("\n",), max_tokens=90, max_words=24)
_CONCLUSION = ReplyBounds(stop=("\n",), max_tokens=110, max_words=60)
_MIN_THOUGHT_TOKENS: dict[Detail, int] = {"brief": 0, "normal": 50, "full": 50}
_CONCLUSION_TOKENS = 30
_PRESENCE_PENALTY = 1.5  # from 1.0 to 1.5, loops of the default model become rare and its words more varied
_MOST_ALIKE = 0.7  # a small model varies a word of its last heading and takes that for another point
_SMALL_OUTLINE = ReplyBounds(stop=("\n\n",), max_tokens=110)


class Requests:
    """Makes the requests of both stages.

    Attributes:
        templates: The wording, in the language of the question.
        skeleton_reply_start: What the last skeleton request made began the reply with.
        is_small: Whether the model is a local or a tiny one, shown examples and stopped at the line's end.
        is_tiny: Whether it is known to be one of the smallest, which repeat what they have read.
        marks_needs: Whether the outline is asked for marks of what points build on.
    """

    def __init__(self, method: SotOptions, conversation: Conversation) -> None:
        provider = method.provider
        self._method = method
        self._conversation = conversation
        self._is_cached = isinstance(provider, VendorProvider)
        self.templates = method.prompts_in_use.for_question(conversation.question)
        # Asked of the model itself: a user may know that another one continues replies, but a stronger one
        # needs no examples, and some vendors refuse a stop string that is a line's end.
        num_parameters = getattr(provider, "num_parameters", 0.0)
        self.is_tiny = 0 < num_parameters < TINY_PARAMETERS
        self.is_small = (provider.supports_prefill and not self._is_cached) or self.is_tiny
        # A vendor's models are strong enough without, and bill every token they read.
        self._may_show_examples = bool(self.templates.examples) and (
            self.is_small or (isinstance(provider, VendorProvider) and provider.is_elsewhere)
        )
        # Greedily, a small model writes the same sentence again and again. Only a model that has the setting
        # and leaves it at that takes the penalty; one that is given for a call goes before.
        self._point_settings: dict[str, Any] = {}
        self._takes_grammars, may_be_tiny = False, self.is_tiny
        if self.is_tiny and isinstance(provider, VendorProvider) and provider.vendor == "openai":
            self._point_settings = {"presence_penalty": _PRESENCE_PENALTY} if method.loop_guard else {}
            if method.prefills:
                self._point_settings["min_tokens"] = _MIN_TOKENS[method.detail]
        if self.is_small and isinstance(provider, LangChainProvider):
            if method.loop_guard and provider.setting("presence_penalty") == 0:
                self._point_settings["presence_penalty"] = _PRESENCE_PENALTY
            may_be_tiny = num_parameters < TINY_PARAMETERS
            # Tiny ones write sentences for headings, whose beginnings are too much alike to be points.
            self._takes_grammars = provider.setting("takes_grammars") is True and not may_be_tiny
            if provider.setting("min_tokens") == 0 and may_be_tiny:
                self._point_settings["min_tokens"] = _MIN_TOKENS[method.detail]
        self.marks_needs = method.dependencies
        self._examples = GRAPH_EXAMPLES[language_of(conversation.question)]
        most = _TINY_HEADINGS if may_be_tiny else _HEADINGS
        self._max_points = method.max_points or (most if self.is_small else None)
        self._point_bounds = (_SMALL_POINT if self.is_small else _POINT)[method.detail]
        if self.is_small and not may_be_tiny and method.detail == "normal":
            self._point_bounds = _LARGER_POINT
        self.skeleton_reply_start: str | None = None
        self._prefix: tuple[Skeleton, SharedPrefix | None] | None = None

    def skeleton(self) -> Request:
        """Asks for the outline."""
        prefix = SharedPrefix(0, self._key) if self._is_cached else None  # what stands before the question
        return Request(
            self._skeleton_messages,
            prefix=prefix,
            bounds=_SMALL_OUTLINE if self.is_small else None,
            parameters=self._outline_form(),
        )

    def _outline_form(self) -> dict[str, Any]:
        """What bounds an outline, for models that take a grammar."""
        if not (self._takes_grammars and self._method.prefills):
            return {}
        num_words = _HEADING_WORDS + (_MARK_WORDS if self.marks_needs else 0)
        return {"grammar": outline_grammar(1, self._max_points or _TINY_HEADINGS, num_words)}

    def outline_reader(self, reply_start: Callable[[], str | None]) -> OutlineReader:
        """A reader of the reply to :meth:`skeleton`, which was begun with what ``reply_start`` returns."""
        most_alike = _MOST_ALIKE if self.is_small else 1.0
        return OutlineReader(reply_start, self._max_points, most_alike)

    def conclusion(self, places: Sequence[PointState]) -> Request:
        """Asks for what follows from all points, which stand in ``places``."""
        return Request(
            partial(self._conclusion_messages, places),
            bounds=_CONCLUSION if self.is_small else None,
            parameters=self._settings(_CONCLUSION_TOKENS),
        )

    def thought(self, thought: Thought, place: PointState) -> Request:
        """Asks for a thought that the user has given.

        A small model is shown two others as earlier turns, of which one builds on the other. Only a tiny one
        is bounded: what the user asks a larger one for may be long.
        """
        return Request(
            partial(self._thought_messages, thought, place.needs),
            place.point,
            bounds=self._point_bounds if self.is_tiny else None,
            parameters=self._settings(_MIN_THOUGHT_TOKENS[self._method.detail]),
        )

    def _settings(self, min_tokens: int) -> dict[str, Any]:
        """Those of points, for what is ``min_tokens`` long with a tiny model."""
        settings = {**self._point_settings}
        return settings | {"min_tokens": min_tokens} if "min_tokens" in settings else settings

    def point(
        self, skeleton: Skeleton, point: Point, *, is_whole: bool, needs: Sequence[PointState] = ()
    ) -> Request:
        """Asks for one point to be written out.

        Args:
            skeleton: The outline shown with it.
            point: The point.
            is_whole: Whether ``skeleton`` is the whole outline, so that all points show the same one.
            needs: The places of the points it builds on, whose text it is shown.
        """
        prefix = self._shared_prefix(skeleton) if is_whole else None
        bounds = self._point_bounds
        if not self.is_small:
            bounds = replace(bounds, stop=_beginnings_of_next(skeleton, point))
        messages = partial(self._point_messages, skeleton, point, needs)
        return Request(
            messages,
            point,
            prefix,
            bounds,
            parameters=self._point_settings,
            skeleton=skeleton,
        )

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
        request = self.templates.skeleton_request(self._conversation.question, prefill=prefill)
        if self.marks_needs:
            request += self.templates.skeleton_needs
        examples = self.templates.skeleton_examples(prefill=prefill) if self._shows_examples else []
        return self._asking(request, self.skeleton_reply_start, written, examples)

    def _point_messages(
        self,
        skeleton: Skeleton,
        point: Point,
        needs: Sequence[PointState],
        *,
        prefill: bool,
        written: str = "",
    ) -> list[BaseMessage]:
        start = self.templates.expansion_reply_start(point) if prefill else None
        question, detail = self._conversation.question, self._method.detail
        request = self.templates.expansion_request(question, skeleton, point, detail=detail, prefill=prefill)
        if needs:
            request += self.templates.needed.format(points=_written(needs))
        examples = (
            self.templates.expansion_examples(detail=detail, prefill=prefill) if self._shows_examples else []
        )
        return self._asking(request, start, written, examples)

    def _conclusion_messages(
        self, places: Sequence[PointState], *, prefill: bool, written: str = ""
    ) -> list[BaseMessage]:
        concluding = self.templates.conclusion.format
        request = concluding(question=self._conversation.question, points=_written(places))
        shown = self._examples if self._shows_examples else ()
        examples = [(concluding(question=e.question, points=e.text), e.conclusion) for e in shown]
        return self._asking(request, "" if prefill and written else None, written, examples)

    def _thought_messages(
        self, thought: Thought, needs: Sequence[PointState], *, prefill: bool, written: str = ""
    ) -> list[BaseMessage]:
        texts = {place.point.text: place.text for place in needs if place.point}
        request, length = thought.request(self._conversation.question, texts), ""
        if self.is_tiny:  # without a length, a tiny model lists numbers
            length = self.templates.thought_length.format(length=self.templates.lengths[self._method.detail])
        is_begun = prefill and self._shows_examples
        start = thought.start if is_begun else "" if prefill and written else None
        shown = self._examples if self._shows_examples else ()
        turns = [turn for example in shown for turn in example.turns(is_begun=is_begun)]
        examples = [(asked + length, reply) for asked, reply in turns]
        return self._asking(request + length, start, written, examples)

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
                self.templates.expansion_request(
                    question, skeleton, point, detail=self._method.detail, prefill=True
                )
                for point in (skeleton.points[0], skeleton.points[-1])
            )
            self._prefix = skeleton, SharedPrefix(common_length(first, last), self._key)
        return self._prefix[1]

    @property
    def _shows_examples(self) -> bool:
        return self._may_show_examples and not self._method.expectations.refuses_examples

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


def _written(places: Sequence[PointState]) -> str:
    """The text of points that are written."""
    return "\n\n".join(
        f"{place.point.number}. {place.point.text}: {place.text}"
        for place in places
        if place.point and place.pieces
    )


def _beginnings_of_next(skeleton: Skeleton, point: Point) -> tuple[str, ...]:
    """Stop strings before which the text of ``point`` ends: the next point in the forms that models write."""
    number = point.number + 1
    if number > len(skeleton):
        return ()
    heading = skeleton.points[point.number].text
    return f"\n{number}. {heading}", f"\n**{number}. {heading}", f"\n{number}. **{heading}"
