"""The requests of one answer: what is asked, what the reply begins with, what requests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from sot_chains.answering.record import Part
from sot_chains.calls.model_call import Request
from sot_chains.calls.options import AnswerOptions
from sot_chains.calls.prefix_cache import Shared
from sot_chains.outline.reader import outline_grammar
from sot_chains.outline.skeleton import Skeleton, Thought
from sot_chains.prompts.conversation import Conversation
from sot_chains.prompts.profile import ReplyBounds, Turns
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.providers.vendor import VendorProvider

_MARK_WORDS = 4  # of "(needs 2, 3)"


class Messages:
    """Makes the requests of both stages."""

    def __init__(self, options: AnswerOptions, conversation: Conversation) -> None:
        self._options = options
        self._profile = options.profile
        self._conversation = conversation
        self.templates = self._profile.prompts.for_question(conversation.question)
        self.max_points = options.max_points or self._profile.max_points  # of an answer
        self.marks_needs = options.dependencies  # whether the outline may mark what points build on
        wrapped = options.provider if isinstance(options.provider, LangChainProvider) else None
        self._local = wrapped.local if wrapped else None
        self._own = wrapped.parameters if wrapped else {}
        self._is_cached = options.caching.find(options.provider) is not None
        self.begins_plainly = bool(self._local and self._profile.short_answer)  # beside the outline

    def find_load(self) -> str | None:
        """Why all answers of this time are written sooner if they are plain, if they are."""
        if self._local is None or self._options.router == "always":
            return None
        most, num_tokens = self.max_points or 5, self._profile.points[self._options.detail].max_tokens or 100
        told = self._options.expectations
        is_slower = self._local.splitting_gain(told.num_answers, told.num_calls, most, num_tokens) < 1.0
        return "points would take longer beside all that the model writes" if is_slower else None

    def outline(self) -> Request:
        """Asks for the outline."""
        templates, profile = self.templates, self._profile
        needs = templates.skeleton_needs if self.marks_needs else ""
        parameters = self._parameters(profile.outline)
        if self._local and self._local.takes_grammars and profile.heading_words and self._options.prefills:
            # Sentences, which one word more tells, are left out: so that others may come.
            last, num_words = (self.max_points or 7) + 2, profile.heading_words + 1
            num_words += _MARK_WORDS if self.marks_needs else 0
            parameters["grammar"] = outline_grammar(last, num_words, self._conversation.question)
        return Request(
            self._conversation,
            templates.skeleton.format(question=self._conversation.question) + needs,
            templates.skeleton_opening,
            templates.skeleton_prefill,
            templates.skeleton_examples() if templates.examples else (),
            shared=self._shared_by_all if self._is_cached else None,
            bounds=profile.outline,
            parameters=parameters,
        )

    def point(self, skeleton: Skeleton, part: Part) -> Request:
        """Asks for the point of ``part`` to be written out, with the text of what it builds on in view."""
        templates, detail, point = self.templates, self._options.detail, part.point
        assert point is not None
        text, named = templates.expansion_request(self._conversation.question, skeleton, point, detail=detail)
        bounds = self._profile.points[detail]
        return Request(
            self._conversation,
            text + templates.needed.format(points=_written(part.needs)) if part.needs else text,
            named + templates.expansion_opening.format(point=point.text),
            templates.expansion_reply_start(point),
            self._point_examples if templates.examples else (),
            point,
            self._shared(skeleton) if self._is_cached else None,
            bounds,
            self._parameters(bounds),
        )

    def thought(self, thought: Thought, part: Part) -> Request:
        """Asks for a thought that the user has given, in the user's words."""
        texts = {need.point.text: need.text for need in part.needs if need.point}
        return Request(
            self._conversation,
            thought.request(self._conversation.question, texts),
            point=part.point,
            shared=Shared(0),
            parameters=self._parameters(replace(self._profile.points[self._options.detail], min_tokens=0)),
        )

    def conclusion(self, parts: Sequence[Part]) -> Request:
        """Asks for what follows from all points."""
        text = self.templates.conclusion.format(question=self._conversation.question, points=_written(parts))
        bounds = self._profile.conclusion
        is_shared = text.startswith(self.templates.shared(self._conversation.question))
        shared, parameters = self._shared_by_all if is_shared else None, self._parameters(bounds)
        return Request(self._conversation, text, shared=shared, bounds=bounds, parameters=parameters)

    def _parameters(self, bounds: ReplyBounds) -> dict[str, Any]:
        """The parameters in ``bounds`` that the model takes, unless the user has set them."""
        provider, own = self._options.provider, self._own
        if isinstance(provider, VendorProvider) and provider.vendor == "openai" and provider.is_elsewhere:
            # A server that continues begun replies knows the least length, too.
            own = {} if self._options.prefills else {"min_tokens": True}
        elif not self._local:
            return {}
        wanted = {"presence_penalty": bounds.presence_penalty, "min_tokens": bounds.min_tokens}
        return {name: value for name, value in wanted.items() if value and not own.get(name)}

    @cached_property
    def _point_examples(self) -> list[Turns]:
        return self.templates.expansion_examples(self._options.detail)

    @cached_property
    def _shared_by_all(self) -> Shared:
        return Shared(len(self.templates.shared(self._conversation.question)))

    def _shared(self, skeleton: Skeleton) -> Shared:
        """What the request for a point of ``skeleton`` shares; eager ones have but a part of the outline."""
        if self._options.eager:
            return self._shared_by_all
        question, detail = self._conversation.question, self._options.detail
        num_shared = self.templates.num_shared(question, skeleton, detail=detail)
        return replace(self._shared_by_all, by_points=num_shared, num_points=len(skeleton))


def _written(parts: Sequence[Part]) -> str:
    """The text of points that are written."""
    return "\n\n".join(
        f"{part.point.number}. {part.point.text}: {part.text}" for part in parts if part.point and part.pieces
    )
