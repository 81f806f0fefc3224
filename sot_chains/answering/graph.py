"""The answer of a graph of thoughts that the user has given, by the fan-out of Skeleton-of-Thought.

Knows thoughts and how they are asked for. The rest is :class:`~sot_chains.answering.answer.Answer`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from sot_chains.answering.answer import Answer, Begun
from sot_chains.answering.resuming import place_of, whole_of
from sot_chains.outline.skeleton import Skeleton
from sot_chains.outline.thoughts import Thought, numbered


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
        self._record.is_graph = True
        self._record.note_outline("", Skeleton(points), None)
        self._record.route_reason = f"a graph of {len(points)} thoughts was given"
        resume = self._setting.resume
        earlier = {point["label"]: point for point in resume["points"]} if resume else {}
        whole = whole_of(earlier, {thought.name: thought.all_needs for thought in self._thoughts})
        self._is_whole = len(whole) == len(points)
        if self._conclusion == "first":
            self._announce_conclusion()
        places = [place_of(point, whole.get(point.text)) for point in points]
        for place, point in zip(places, points, strict=True):
            place.needs = [places[number - 1] for number in point.needs]
            self._writer.announce(place)
        for place, thought in zip(places, self._thoughts, strict=True):
            yield place, self._requests.thought(thought, place)
        if self._conclusion:
            yield self._concluding()
        self._record.is_outlined = True
