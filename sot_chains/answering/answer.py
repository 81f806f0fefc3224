"""One answer in the two stages of Skeleton-of-Thought (arXiv 2307.15337, section 2.1).

This is the algorithm: :meth:`Answer.write`. It knows providers, prompts and points; it does not know
Runnables or chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import Runnable, RunnableConfig

from sot_chains.aio.blocking import Tasks, cancel_and_wait
from sot_chains.answering.messages import Messages
from sot_chains.answering.point_writer import PlainInsteadError, PointWriter
from sot_chains.answering.record import AnswerRecord, Part, points_of, take_over, whole_points
from sot_chains.answering.streams import AnswerText, ReadingOrder
from sot_chains.calls.model_call import Caller, Request
from sot_chains.calls.options import AnswerOptions, CallOptions
from sot_chains.calls.trace import Call, span
from sot_chains.outline.reader import OutlineReader
from sot_chains.outline.skeleton import Point, Skeleton, numbered, read_mark
from sot_chains.prompts.conversation import Conversation
from sot_chains.providers.base import DeadlineError, ProviderError


class Answer:
    """The answer to one question. It is written once, by :meth:`write` or by reading :meth:`read`.

    Args:
        options: How answers are written.
        call_options: Options of this answer.
        conversation: The question and what stands before it.
    """

    def __init__(self, options: AnswerOptions, call_options: CallOptions, conversation: Conversation) -> None:
        self.conversation = conversation
        self.message_id = call_options.message_id  # of the finished message
        self._options, self._call_options = options, call_options
        self._conclusion = options.conclusion
        self._points: list[Part] = []  # begun; nobody is told of them while the outline may have a fault
        self._messages = Messages(options, conversation)
        self._caller = Caller(options, call_options)
        self._record = AnswerRecord(options, list(filter(None, [call_options.asked_before])))
        self._order = ReadingOrder(self._record.parts)
        self._writer = PointWriter(options, self._caller, self._record, self._order, call_options.arrivals)
        self._given = self._given_points() if options.thoughts or call_options.resume else ()
        self._whole = whole_points(call_options.resume, self._given) if call_options.resume else {}

    async def write(self) -> AIMessage:
        """Writes the answer to its end.

        Raises:
            DeadlineError: The deadline passed before there was anything to return.
            ProviderError: Nothing could be written. Its ``trace`` holds what had been paid for.
        """
        async with self._recorded():
            tasks, plain = Tasks(), Part(kind="plain")

            def write_points(points: Sequence[Point], is_sure: bool) -> None:
                # Stage 2: all points are written at once, each by a call of its own.
                for part in self._begin(points, is_sure=is_sure):
                    tasks.start(self._writer.write(part, self._request_for))

            async def write_outline() -> None:
                # Stage 1: an outline. Points come when it is whole or, if eager, when the next begins.
                if fault := await self._outline(plain, write_points):
                    await write_plainly(fault, plain)
                if self._conclusion and not self._record.is_plain:  # it builds on all points
                    tasks.start(self._writer.write(self._begin_conclusion(), self._request_for))
                self._record.is_outlined = True

            async def write_plainly(reason: str, plain: Part) -> None:
                self._record.begin_plain(reason)
                self._writer.announce(plain)
                await self._writer.write(plain, self._request_for)

            try:
                if reason_for_plain := await self._reason_for_plain():
                    await write_plainly(reason_for_plain, plain)
                else:
                    if self._messages.begins_plainly and not (self._given or self._caller.is_limited):
                        # It is the answer if it is whole before any point, or the outline is of no use.
                        tasks.start(self._writer.race(plain, self._request_for), is_needed=False)
                    tasks.start(write_outline())
                    await tasks.join()
            except PlainInsteadError as instead:
                await write_plainly(*instead.args)
        return self.message()  # in reading order; a stream is read so meanwhile, see `read`

    async def read(self) -> AsyncGenerator[str, None]:
        """Writes the answer and yields its text from first to last, each piece as early as it can be read.

        Raises:
            ProviderError: As :meth:`write`.
        """
        text = AnswerText(self._messages.templates.separator)
        writing = asyncio.create_task(self.write())
        writing.add_done_callback(lambda _: self._order.close())
        try:
            async with aclosing(self._order.read()) as pieces:
                async for part, piece in pieces:
                    if added := text.add(part.point, piece):
                        yield added
            await writing
        finally:
            await cancel_and_wait([writing])

    def message(self) -> AIMessage:
        """The finished answer."""
        text, written = AnswerText(self._messages.templates.separator), ""
        for part in self._record.parts:
            if part.status != "omitted":
                written += text.add(part.point, part.text)
        return AIMessage(content=written, **self._record.particulars(self.message_id))

    def last_chunk(self) -> AIMessageChunk:
        """The last chunk of a stream of the text, which carries everything besides the text."""
        return AIMessageChunk(content="", chunk_position="last", **self._record.particulars(self.message_id))

    def _given_points(self) -> Sequence[Point]:
        """The points, if they are known from the user or from an earlier answer."""
        record, resume, thoughts = self._record, self._call_options.resume, self._options.thoughts
        if thoughts:
            record.is_graph, record.skeleton_reply = True, ""
            record.route_reason = f"a graph of {len(thoughts)} thoughts was given"
            return numbered(thoughts)
        if resume is None or resume["skeleton_reply"] is None or not resume["points"]:
            return ()
        if resume["route"] == "graph":
            record.is_graph, self._conclusion = True, self._conclusion or bool(resume["conclusion"])
        record.skeleton_reply = resume["skeleton_reply"]
        points = points_of(resume)
        num_missing = len(points) - len(whole_points(resume, points))
        record.route_reason = f"resumed: {num_missing} of {len(points)} points were missing"
        return points

    async def _reason_for_plain(self) -> str | None:
        """Why the answer is to be plain, whatever the outline; ``None`` if it is not."""
        if self._given:
            return None
        if not self.conversation.ends_with_question:
            return "the conversation does not end with a question of the user"
        router = self._options.router
        if router == "never":
            return "plain answers are asked for"
        if isinstance(router, Runnable):
            config = RunnableConfig(**{**self._call_options.config, "run_name": "route"})
            route = self._call_options.route or await router.ainvoke(list(self.conversation.messages), config)
            reason = f"{route.router} router: {route.reason}"
            if not route.use_sot:
                return reason
            self._record.route_reason = f", {reason}"
            if route.is_graph:
                self._record.is_graph = self._messages.marks_needs = self._conclusion = True
        return None

    async def _outline(self, plain: Part, write: Callable[[Sequence[Point], bool], None]) -> str | None:
        """Writes the outline and hands on its points; if it is of no use none, but why."""
        if self._given:
            write(self._given, True)
            return None
        record, messages, profile = self._record, self._messages, self._options.profile
        if plain.call:
            await plain.begun.wait()  # by then it is known what else is asked at this moment
        if load := messages.find_load():
            return load
        call = record.skeleton_call = Call("skeleton", "skeleton")
        record.calls.append(call)
        bounds = profile.heading_words, profile.most_alike, profile.fewest_points
        reader = OutlineReader(messages.max_points, *bounds, messages.templates.example_headings)

        def take(piece: str | None) -> bool:
            nonlocal load
            if piece is None:
                reader.restart()
                return False
            reader.reply_start = call.reply_start
            reader.feed(piece)
            if self._options.eager:
                is_sure = bool(record.parts) or not reader.find_fault()
                if is_sure or messages.begins_plainly:  # where a call more costs nothing
                    write(reader.take(), is_sure)
            load = None if record.parts else messages.find_load()
            return reader.is_over or load is not None

        await self._caller.make(call, messages.outline(), take)
        reader.end(is_cut=reader.is_over or call.is_cut_off)
        fault, points, record.skeleton_reply = load or reader.find_fault(), reader.take(), reader.text
        if fault and not record.parts:
            for part in self._points:
                part.end("omitted", fault)
            record.skeleton = Skeleton.of(reader.headings)
            return fault
        record.cut = f"the outline was cut: it ended with {call.finish_reason!r}" if call.is_cut_off else ""
        write(points, True)
        record.route_reason = f"the skeleton has {len(record.skeleton.points)} points{record.route_reason}"
        return None

    def _begin(self, points: Sequence[Point], *, is_sure: bool) -> list[Part]:
        """Adds ``points`` to the skeleton and, once it ``is_sure`` to be one, to the answer."""
        if points and self._messages.marks_needs and not self._given:
            read = list(self._record.skeleton)
            for point in points:
                read.append(read_mark(point, read))
            points = read[-len(points) :]
        self._record.skeleton = Skeleton((*self._record.skeleton.points, *points))
        parts = list(map(Part, points))
        self._points += parts
        for point, part in zip(points, parts, strict=True):
            part.needs = tuple(self._points[number - 1] for number in point.needs) if point.needs else ()
            if whole := self._whole.get(point.text):
                take_over(part, whole)
        for part in self._points[len(self._record.parts) :] if is_sure else ():
            self._writer.announce(part)
        return parts

    def _begin_conclusion(self) -> Part:
        """The conclusion, which is written once all points are."""
        resume, part = self._call_options.resume, Part(kind="conclusion", needs=list(self._record.parts))
        is_whole = resume is not None and len(self._whole) == len(self._given) > 0
        take_over(part, resume["conclusion"] if resume and is_whole else None)
        self._writer.announce(part)
        return part

    def _request_for(self, part: Part) -> Request:
        """The request for ``part``, once what it builds on is written."""
        if part.point is None:
            is_plain = part.kind == "plain"
            return Request(self.conversation) if is_plain else self._messages.conclusion(part.needs)
        if thoughts := self._options.thoughts:
            return self._messages.thought(thoughts[part.point.number - 1], part)
        return self._messages.point(self._record.skeleton, part)

    @asynccontextmanager
    async def _recorded(self) -> AsyncIterator[None]:
        """Ends the answer at the deadline with the text received so far, and records how it has ended.

        Raises:
            DeadlineError: The deadline passed before there was anything to return.
            Exception: The error of a call, if nothing was written.
        """
        record, expectations = self._record, self._options.expectations
        expectations.num_answers += 1
        try:
            with span("answer", self._options.provider.model_name, record.calls):
                try:
                    async with asyncio.timeout(self._call_options.deadline_seconds) as deadline:
                        yield
                except TimeoutError:
                    if not deadline.expired():
                        raise
                    self._cut_short()
                else:
                    if not record.has_any:
                        reasons = [part.reason for part in record.parts if part.reason]
                        nothing = ProviderError((reasons or ["the model wrote nothing"])[-1])
                        raise (self._writer.errors or [nothing])[-1]
        except ProviderError as error:
            record.has_failed, record.seconds = True, self._caller.now()
            record.end_parts(str(error))
            error.trace = record.trace()
            raise
        finally:
            expectations.num_answers -= 1
        record.seconds = self._caller.now()

    def _cut_short(self) -> None:
        record, seconds = self._record, self._call_options.deadline_seconds
        if not record.parts or (record.is_plain and not record.parts[0].pieces):
            what = "the model wrote anything" if record.is_outlined else "there was an outline"
            raise DeadlineError(f"the deadline of {seconds:g} s passed before {what}; raise deadline_seconds")
        if not record.is_outlined:
            record.cut = record.route_reason = "the outline was cut at the deadline"
            record.skeleton = Skeleton(tuple([part.point for part in record.parts if part.point]))
        record.end_parts(f"the deadline of {seconds} s passed")
