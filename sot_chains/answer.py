"""One answer being written: the two stages of Skeleton-of-Thought (arXiv 2307.15337, section 2.1).

This is the algorithm. It knows providers, prompts and points; it does not know Runnables or chunks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.runnables import RunnableConfig

from sot_chains.conversation import Conversation
from sot_chains.echo import PointText
from sot_chains.fan_out import ReadingOrder, fan_out
from sot_chains.layout import Layout
from sot_chains.prompts import Prompts
from sot_chains.providers.base import Delta, Provider
from sot_chains.skeleton import Point, Skeleton, parse_skeleton
from sot_chains.trace import Call, PointTrace, SotTrace, total_usage

_FEWEST_POINTS = 2


class PointDelta(NamedTuple):
    """Text that has just been written.

    Attributes:
        point: The point it belongs to; ``None`` where the model answers plainly, in one piece.
        text: What was added; ``""`` to say that the point exists and is being written.
    """

    point: Point | None
    text: str


@dataclass(frozen=True)
class Method:
    """How answers are written: what stays the same from question to question."""

    provider: Provider
    prompts: Prompts
    prefill: bool
    max_points: int | None


@dataclass(frozen=True)
class Setting:
    """Under what circumstances one answer is written.

    Attributes:
        config: The config of its model calls: who listens, tags, metadata.
        parameters: What the model is told with each call: ``stop``, ``temperature``.
        limit: Bounds the calls in flight, possibly together with those of other answers.
        message_id: The id of the finished message.
    """

    config: RunnableConfig
    parameters: dict[str, Any]
    limit: asyncio.Semaphore | None
    message_id: str


class Answer:
    """The answer to one question. Written once, by reading :meth:`in_reading_order` to its end."""

    def __init__(self, method: Method, conversation: Conversation, setting: Setting) -> None:
        self._method = method
        self._conversation = conversation
        self._setting = setting
        self._templates = method.prompts.for_question(conversation.question)
        self._begin = time.perf_counter()
        self.message_id = setting.message_id
        self._seconds = 0.0
        self._first_text_seconds: float | None = None
        self._route_reason = ""
        self._skeleton = Skeleton()
        self._skeleton_call: Call | None = None
        self._calls: list[Call] = []  # what is shown: one for each point, or one for the plain answer
        self._points: tuple[Point, ...] = ()  # empty on the plain route

    async def in_reading_order(
        self, on_arrival: Callable[[PointDelta], None] | None = None
    ) -> AsyncGenerator[str, None]:
        """Writes the answer and yields its text from first to last, each piece as early as it can be read.

        Args:
            on_arrival: Called with each piece as it is written, which is in no order across points.
        """
        # 1. An outline, and with it the route.
        await self._outline()
        # 2. All of its points at once, or else the plain answer.
        streams = [self._expand(point) for point in self._points] or [self._answer_plainly()]
        order = ReadingOrder[str](len(streams))
        layout = Layout(self._points, self._templates.separator)
        async with aclosing(self._arrivals(streams)) as arrivals:
            async for position, text in arrivals:
                if on_arrival and text is not None:
                    on_arrival(PointDelta(self._points[position] if self._points else None, text))
                # 3. Put together in reading order.
                for place, piece in order.arrive(position, text):
                    if piece is not None and (visible := layout.add(place, piece)):
                        if self._first_text_seconds is None:
                            self._first_text_seconds = self._now()
                        yield visible
        self._seconds = self._now()

    async def _outline(self) -> None:
        if not self._conversation.ends_with_question:
            self._route_reason = "the conversation does not end with a question of the user"
            return
        reply_start = self._templates.skeleton_prefill if self._method.prefill else None
        request = self._templates.skeleton_request(self._conversation.question, prefill=self._method.prefill)
        self._skeleton_call = call = Call("skeleton")
        async for text in self._call(call, self._conversation.asking(request, reply_start=reply_start)):
            call.shown.append(text)
        # A model may go on from the reply begun for it or begin anew; the reading with more points is right.
        readings = [parse_skeleton((reply_start or "") + call.text), parse_skeleton(call.text)]
        self._skeleton = max(readings, key=len).first(self._method.max_points)
        if len(self._skeleton) >= _FEWEST_POINTS:
            self._points = self._skeleton.points
            self._route_reason = f"the skeleton has {len(self._points)} points"
        else:
            self._route_reason = (
                f"the skeleton has {len(self._skeleton) or 'no'} usable points, fewer than {_FEWEST_POINTS}"
            )

    async def _arrivals(
        self, streams: Sequence[AsyncGenerator[str, None]]
    ) -> AsyncGenerator[tuple[int, str | None], None]:
        for position in range(len(self._points)):
            yield position, ""
        async with aclosing(fan_out(streams)) as arrivals:
            async for arrival in arrivals:
                yield arrival

    def _expand(self, point: Point) -> AsyncGenerator[str, None]:
        templates, prefill = self._templates, self._method.prefill
        request = templates.expansion_request(
            self._conversation.question, self._skeleton, point, prefill=prefill
        )
        reply_start = templates.expansion_reply_start(point) if prefill else None
        call = Call(f"point_{point.number}")
        self._calls.append(call)
        messages = self._conversation.asking(request, reply_start=reply_start)
        return self._cleaned(call, self._call(call, messages), PointText(point))

    async def _cleaned(
        self, call: Call, raw: AsyncGenerator[str, None], cleaned: PointText
    ) -> AsyncGenerator[str, None]:
        async with aclosing(raw):
            async for piece in raw:
                if text := cleaned.feed(piece):
                    call.shown.append(text)
                    yield text
        if text := cleaned.end():
            call.shown.append(text)
            yield text

    async def _answer_plainly(self) -> AsyncGenerator[str, None]:
        call = Call("plain")
        self._calls.append(call)
        async with aclosing(self._call(call, self._conversation.messages)) as pieces:
            async for text in pieces:
                call.shown.append(text)
                yield text

    async def _call(self, call: Call, messages: Sequence[BaseMessage]) -> AsyncGenerator[str, None]:
        """Every call of the model is made here: named, bounded, timed, counted."""
        config = RunnableConfig(**{**self._setting.config, "run_name": call.name})
        async with self._setting.limit or nullcontext():
            call.start_seconds = self._now()
            deltas = self._method.provider.stream(messages, config=config, **self._setting.parameters)
            async with aclosing(cast("AsyncGenerator[Delta, None]", deltas)):
                async for delta in deltas:
                    call.take(delta, self._now())
                    if delta.text:
                        yield delta.text
            call.end_seconds = self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    def message(self) -> AIMessage:
        """The finished answer."""
        text = Layout(self._points, self._templates.separator).whole(call.text for call in self._calls)
        return AIMessage(content=text, **self._particulars())

    def last_chunk(self) -> AIMessageChunk:
        """What a stream of the text ends with: all there is besides the text."""
        return AIMessageChunk(content="", chunk_position="last", **self._particulars())

    def _particulars(self) -> dict[str, Any]:
        trace = self._trace()
        names = [call.model_name for call in self._all_calls() if call.model_name]
        model_name = names[-1] if names else self._method.provider.model_name
        return {
            "id": self._setting.message_id,
            "usage_metadata": trace["usage"],
            "response_metadata": {"model_name": model_name, "sot": trace},
        }

    def _all_calls(self) -> list[Call]:
        return [self._skeleton_call, *self._calls] if self._skeleton_call else self._calls

    def _trace(self) -> SotTrace:
        skeleton_call, points = self._skeleton_call, self._points
        return SotTrace(
            route="sot" if points else "plain",
            route_reason=self._route_reason,
            skeleton=[point.text for point in self._skeleton],
            skeleton_reply=skeleton_call.text if skeleton_call else None,
            skeleton_call=skeleton_call.trace() if skeleton_call else None,
            points=[
                PointTrace(number=point.number, label=point.text, text=call.text, **call.trace())
                for point, call in zip(points, self._calls, strict=False)
            ],
            plain_call=None if points else self._calls[0].trace(),
            seconds=self._seconds,
            first_text_seconds=self._first_text_seconds,
            critical_path_seconds=(skeleton_call.seconds if skeleton_call else 0.0)
            + max(call.seconds for call in self._calls),
            num_calls=len(self._all_calls()),
            usage=total_usage(self._all_calls()),
        )
