"""One lane of a race: a question answered in one way, told piece by piece, and then as it is shown."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.utils import message_chunk_to_message

from sot_chains.calls.usage import Price, tokens_of
from sot_chains.chain import SkeletonOfThought
from sot_chains.rendering import Lane, lane_of
from sot_chains.serving.protocol import refused
from sot_chains.serving.ways import Answers

TITLES = {"plain": "Plain decoding", "sot": "Skeleton-of-Thought", "copy": "Copying from the folder"}
Tell: TypeAlias = Callable[[str, dict[str, Any]], None]


@dataclass
class Racer:
    """One way to answer.

    Attributes:
        name: Of the lane.
        title: Of the lane, for people.
        answers: Answers.
        parameters: The parameters of the call.
        tell: Takes events: their kind, and what they say.
        price: What the model costs, for an answer without a trace.
    """

    name: str
    title: str
    answers: Answers
    parameters: dict[str, Any]
    tell: Tell
    price: Price | None = None

    async def run(self, question: str) -> Lane:
        """Answers ``question``; an error ends this lane alone."""
        self._tell("start")
        try:
            if isinstance(self.answers, SkeletonOfThought):
                lane = lane_of(self.name, self.title, await self._by_points(self.answers, question))
            else:
                lane = await self._in_one_piece(question)
        except Exception as error:  # whatever a model raises is shown in its lane
            lane = Lane(self.name, self.title, f"It failed: {refused(error)}")
        self._tell("done", seconds=lane.seconds, note=lane.note)
        return lane

    async def _by_points(self, chain: SkeletonOfThought, question: str) -> AIMessage:
        async with aclosing(chain.astream_points(question, **self.parameters)) as deltas:
            async for point, text in deltas:
                if text:
                    self._tell("text", point=point.number if point else 0, text=text)
                elif point:
                    self._tell("point", point=point.number, heading=f"{point.number}. {point.text}")
                else:
                    self._tell("point", point=0, heading="")
        return deltas.message

    async def _in_one_piece(self, question: str) -> Lane:
        begin, first, whole = time.perf_counter(), None, AIMessageChunk(content="")
        self._tell("point", point=0, heading="")
        chunks = self.answers.astream(question, **self.parameters)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk, None]", chunks)):
            async for chunk in chunks:
                whole = whole + cast("AIMessageChunk", chunk)
                if text := str(chunk.text):
                    first = time.perf_counter() - begin if first is None else first
                    self._tell("text", point=0, text=text)
        message = message_chunk_to_message(whole)
        assert isinstance(message, AIMessage)
        seconds = time.perf_counter() - begin
        lane = lane_of(self.name, self.title, message, seconds=seconds, first_text_seconds=first)
        return replace(lane, price=self.price.of(tokens_of([message.usage_metadata])) if self.price else None)

    def _tell(self, kind: str, **event: Any) -> None:
        self.tell(kind, {"lane": self.name, **event})
