"""The answer of a graph of thoughts that the user has given, by the fan-out of Skeleton-of-Thought.

Knows thoughts and how they are asked for. The rest is :class:`~sot_chains.answering.answer.Answer`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from langchain_core.messages import BaseMessage

from sot_chains.answering.answer import Answer, Begun
from sot_chains.calls.model_call import Request
from sot_chains.calls.trace import PointState
from sot_chains.text.skeleton import Point, Skeleton
from sot_chains.text.thoughts import Thought, numbered


class GraphAnswer(Answer):
    """The answer to one question by given thoughts; see :class:`Answer`.

    Args:
        thoughts: The thoughts, in reading order.
        arguments: Those of :class:`Answer`.
    """

    def __init__(self, thoughts: Sequence[Thought], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._thoughts = thoughts

    async def _points(self) -> AsyncGenerator[Begun, None]:
        """A place for each thought, with the request for its text, and the conclusion."""
        points = numbered(self._thoughts)
        self._record.note_outline("", Skeleton(points), None)
        self._record.route_reason = f"a graph of {len(points)} thoughts was given"
        resume = self._setting.resume
        earlier = {point["label"]: point for point in resume["points"]} if resume else {}
        if self._conclusion == "first":
            self._announce_conclusion()
        places = [self._place(point, earlier) for point in points]
        for place, point in zip(places, points, strict=True):
            place.needs = [places[number - 1] for number in point.needs]
            self._writer.announce(place)
        for place, thought in zip(places, self._thoughts, strict=True):
            yield place, Request(partial(self._messages, thought, place.needs), place.point)
        if self._conclusion:
            yield self._concluding()
        self._record.is_outlined = True

    @staticmethod
    def _place(point: Point, earlier: Mapping[str, Any]) -> PointState:
        before = earlier.get(point.text)
        if before is None or before["status"] != "complete":
            return PointState(point)
        place = PointState(point, pieces=[before["text"]], resumed=before)
        place.end("complete")
        return place

    def _messages(
        self, thought: Thought, needs: Sequence[PointState], *, prefill: bool, written: str = ""
    ) -> list[BaseMessage]:
        texts = {place.point.text: place.text for place in needs if place.point}
        request = thought.request(self.conversation.question, texts)
        start = written if prefill and written else None
        return self.conversation.asking(request, reply_start=start, examples=())
