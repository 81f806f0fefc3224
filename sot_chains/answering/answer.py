"""One answer in the two stages of Skeleton-of-Thought (arXiv 2307.15337, section 2.1).

This is the algorithm. It knows providers, prompts and points; it does not know Runnables or chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import RunnableConfig

from sot_chains.aio.tasks import Tasks, cancel_and_wait
from sot_chains.answering.point_writer import PlainInsteadError, PointDelta, PointWriter
from sot_chains.answering.reading_order import ReadingOrder
from sot_chains.answering.record import AnswerRecord
from sot_chains.answering.requests import Requests
from sot_chains.answering.resuming import place_of, whole_of
from sot_chains.calls.model_call import Caller, Request
from sot_chains.calls.options import CallOptions, SotOptions
from sot_chains.calls.reply import Restarted, TextDelta
from sot_chains.calls.trace import Call, PointState, SotTrace
from sot_chains.filters.reply_text import AnswerRenderer
from sot_chains.outline.marks import MarkReader
from sot_chains.outline.reader import OutlineReader, find_fault
from sot_chains.outline.skeleton import Point, Skeleton
from sot_chains.prompts.conversation import Conversation
from sot_chains.providers.base import DeadlineError, ProviderError

Begun = tuple[PointState, Request]


class Answer:
    """The answer to one question. It is written once, by :meth:`write` or by reading :meth:`read`.

    Args:
        method: How answers are written.
        conversation: The question and what stands before it.
        setting: The circumstances of this answer.
        on_arrival: Called with each piece as it is written, in the order of arrival across points.

    Attributes:
        message_id: The id of the finished message.
    """

    def __init__(
        self,
        method: SotOptions,
        conversation: Conversation,
        setting: CallOptions,
        on_arrival: Callable[[PointDelta], None] | None = None,
    ) -> None:
        self.message_id = setting.message_id
        self.conversation = conversation
        self._method = method
        self._setting = setting
        self._conclusion = method.conclusion
        self._marks = MarkReader()
        self._is_whole = False  # all points are taken over from an earlier answer
        self._place_of: dict[int, PointState] = {}  # by the number of the point
        self._requests = Requests(method, conversation)
        self._caller = Caller(method, setting)
        self._record = AnswerRecord(method)
        self._order = ReadingOrder(self._record.places)
        self._writer = PointWriter(method, self._caller, self._record, self._order, on_arrival)

    async def write(self) -> AIMessage:
        """Writes the answer to its end.

        Raises:
            DeadlineError: The deadline passed before there was anything to return.
            ProviderError: Nothing could be written. Its ``trace`` holds what had been paid for.
        """
        async with self._with_trace(), self._until_deadline():
            tasks = Tasks()

            async def outline_and_points() -> None:
                # 1. The model writes an outline. Points come when it is whole or, if the method is eager,
                #    each one as soon as the next begins. There are none if the answer is to be plain.
                async for place, request in self._points():
                    # 2. All points are written at once, each by a call of its own.
                    tasks.start(self._writer.write(place, request))

            try:
                tasks.start(outline_and_points())
                await tasks.join()
            except PlainInsteadError as failed:
                self._record.begin_again(str(failed))
            if not self._record.places:
                self._record.is_plain = True
                plain = self._writer.announce(PointState(None))
                await self._writer.write(plain, self._requests.plain())
        # 3. They are put together in reading order. A stream is read so meanwhile: see `read`.
        return self.message()

    async def read(self) -> AsyncGenerator[str, None]:
        """Writes the answer and yields its text from first to last, each piece as early as it can be read.

        Raises:
            ProviderError: As :meth:`write`.
        """
        renderer = self._renderer()
        writing = asyncio.create_task(self.write())
        writing.add_done_callback(lambda _: self._order.close())
        try:
            async with aclosing(self._order.read()) as pieces:
                async for place, piece in pieces:
                    if text := renderer.add(place.point, piece):
                        yield text
            await writing
        finally:
            await cancel_and_wait([writing])

    def message(self) -> AIMessage:
        """The finished answer."""
        shown = [place for place in self._record.places if place.status != "omitted"]
        text = self._renderer().whole((place.point, place.text) for place in shown)
        return AIMessage(content=text, **self._record.particulars(self.message_id))

    def last_chunk(self) -> AIMessageChunk:
        """The last chunk of a stream of the text, which carries everything besides the text."""
        particulars = self._record.particulars(self.message_id)
        return AIMessageChunk(content="", chunk_position="last", **particulars)

    def _renderer(self) -> AnswerRenderer:
        return AnswerRenderer(self._requests.templates.separator)

    # --- the points

    async def _points(self) -> AsyncGenerator[Begun, None]:
        """The points of the answer, each with the request for its text; none for a plain answer."""
        resume = self._setting.resume
        if resume is not None and resume["skeleton_reply"] is not None and resume["points"]:
            for begun in self._resumed(resume):
                yield begun
        elif reason := await self._reason_for_plain():
            self._record.route_reason = reason
        else:
            async with aclosing(self._outlined()) as points:
                async for begun in points:
                    yield begun
        if self._record.places and self._conclusion:
            yield self._concluding()
        self._record.is_outlined = True

    async def _reason_for_plain(self) -> str | None:
        """Why the answer is to be plain, whatever the outline; ``None`` if it is not."""
        if not self.conversation.ends_with_question:
            return "the conversation does not end with a question of the user"
        if self._method.router is None:
            return None
        config = RunnableConfig(**{**self._setting.config, "run_name": "route"})
        route = await self._method.router.ainvoke(list(self.conversation.messages), config)
        reason = f"{route.router} router: {route.reason}"
        if not route.use_sot:
            return reason
        self._record.router_reason = reason
        if route.is_graph:
            self._record.is_graph = True
            self._requests.marks_needs, self._conclusion = True, self._conclusion or True
        return None

    async def _outlined(self) -> AsyncGenerator[Begun, None]:
        """The points of an outline that the model writes now."""
        record, is_eager = self._record, self._method.eager
        reader = self._requests.outline_reader(lambda: self._requests.skeleton_reply_start)
        call = record.skeleton_call = record.begin(Call("skeleton", "skeleton"))
        async with aclosing(self._caller.stream(call, self._requests.skeleton())) as events:
            async for event in events:
                match event:
                    case TextDelta(text):
                        reader.feed(text)
                        if is_eager and (points := self._marked(reader.take())):
                            skeleton = self._skeleton_of(reader)
                            for point in points:
                                yield self._begun(point, skeleton)
                    case Restarted():
                        reader.restart()
                if reader.is_over:
                    break
        reader.end(is_cut=reader.is_over or call.is_cut_off)
        fault = find_fault(reader.headings, self._requests.templates.example_headings)
        record.skeleton_seconds = call.end_seconds - call.start_seconds
        points = self._marked(reader.take())
        record.plain_share = self._requests.plain_share()
        skeleton = self._skeleton_of(reader)
        record.note_outline(reader.text, skeleton, fault)
        for point in points if record.places or not fault else ():
            yield self._begun(point, skeleton)

    def _marked(self, points: list[Point]) -> list[Point]:
        """The next points of the outline, with what they build on if the model may mark that."""
        return [self._marks.read(point) for point in points] if self._requests.marks_needs else points

    def _skeleton_of(self, reader: OutlineReader) -> Skeleton:
        marked = self._marks.points
        return Skeleton(tuple(marked)) if marked else reader.skeleton

    def _begun(self, point: Point, skeleton: Skeleton) -> Begun:
        if self._conclusion == "first" and not self._record.places:
            self._announce_conclusion()
        needs = [self._place_of[number] for number in point.needs]
        place = self._place_of[point.number] = self._writer.announce(PointState(point, needs=needs))
        is_whole = not self._method.eager
        return place, self._requests.point(skeleton, point, is_whole=is_whole, needs=needs)

    def _announce_conclusion(self) -> PointState:
        earlier = self._setting.resume.get("conclusion") if self._setting.resume else None
        self._record.conclusion = place_of(None, earlier if self._is_whole else None, part="conclusion")
        return self._writer.announce(self._record.conclusion)

    def _concluding(self) -> Begun:
        """The conclusion, which is written once all points are."""
        place = self._record.conclusion or self._announce_conclusion()
        place.needs = [other for other in self._record.places if other.point]
        return place, self._requests.conclusion(place.needs)

    def _resumed(self, resume: SotTrace) -> list[Begun]:
        """The points of an earlier answer: those that are complete, with their text, and the others."""
        earlier = {point["number"]: point for point in resume["points"]}
        needs = {n: tuple(p.get("needs", ())) for n, p in earlier.items()}
        skeleton = Skeleton(
            tuple(replace(p, needs=needs.get(p.number, ())) for p in Skeleton.of(resume["skeleton"]))
        )
        whole = whole_of(earlier, {point.number: point.needs for point in skeleton})
        self._is_whole = len(whole) == len(skeleton)
        self._record.skeleton, self._record.skeleton_reply = skeleton, resume["skeleton_reply"]
        num_missing = len(skeleton) - len(whole)
        self._record.route_reason = f"resumed: {num_missing} of {len(skeleton)} points were missing"
        if resume.get("route") == "graph":
            self._record.is_graph, self._conclusion = True, self._conclusion or bool(resume.get("conclusion"))
        if self._conclusion == "first":
            self._announce_conclusion()
        begun: list[Begun] = []
        for point in skeleton:
            place = place_of(point, whole.get(point.number))
            place.needs = [self._place_of[number] for number in point.needs]
            self._place_of[point.number] = self._writer.announce(place)
            begun.append((place, self._requests.point(skeleton, point, is_whole=True, needs=place.needs)))
        return begun

    # --- the end

    @asynccontextmanager
    async def _with_trace(self) -> AsyncIterator[None]:
        """Attaches the trace to a provider's error."""
        try:
            yield
        except ProviderError as error:
            self._record.fail(str(error), self._caller.now())
            error.trace = self._record.trace()
            raise
        self._record.seconds = self._caller.now()

    @asynccontextmanager
    async def _until_deadline(self) -> AsyncIterator[None]:
        """Ends the answer at the deadline with the text received so far.

        Raises:
            DeadlineError: The deadline passed before there was anything to return.
            Exception: The error of a call, if nothing was written.
        """
        try:
            async with asyncio.timeout(self._setting.deadline_seconds) as deadline:
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            self._cut_short()
        else:
            if not self._record.has_any:
                reasons = [place.reason for place in self._record.places if place.reason]
                nothing = ProviderError((reasons or ["the model wrote nothing"])[-1])
                raise (self._writer.errors or [nothing])[-1]

    def _cut_short(self) -> None:
        record, seconds = self._record, self._setting.deadline_seconds
        if not record.places or (record.is_plain and not record.places[0].pieces):
            what = "the model wrote anything" if record.is_outlined else "there was an outline"
            raise DeadlineError(f"the deadline of {seconds:g} s passed before {what}; raise deadline_seconds")
        if not record.is_outlined:
            record.cut_outline("the outline was cut at the deadline")
        record.end_places(f"the deadline of {seconds} s passed")
