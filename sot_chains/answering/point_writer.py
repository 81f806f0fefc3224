"""Writing the parts of an answer, each by one call, and what happens to one whose call fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from sot_chains.answering.record import AnswerRecord, Part
from sot_chains.answering.streams import ReadingOrder
from sot_chains.calls.model_call import Caller, Request
from sot_chains.calls.options import AnswerOptions
from sot_chains.calls.trace import Call, Status, StoppedBy
from sot_chains.filters.points import HeadingFilter, OverrunFilter, Pipeline, TextFilter, WholeSentences
from sot_chains.outline.words import are_alike, ends_sentence, num_words, without_repetitions
from sot_chains.providers.replies import LoopGuard

_STOPPED_BY: dict[type, StoppedBy] = {OverrunFilter: "overrun", LoopGuard: "loop"}


class PlainInsteadError(Exception):
    """A plain answer takes the place of all points: why, and the answer, which may be whole already."""


class PointWriter:
    """Writes parts: pulls the text of a call, filters it and hands it to the reader.

    Args:
        options: How answers are written.
        caller: Makes the calls.
        record: Where calls and parts are recorded.
        order: The reader to wake when text has arrived.
        arrivals: Takes each piece as it is written, in the order of arrival across parts, and ``None`` for
            the end of a part.
    """

    def __init__(
        self,
        options: AnswerOptions,
        caller: Caller,
        record: AnswerRecord,
        order: ReadingOrder,
        arrivals: Callable[[tuple[Part, str | None]], None] | None,
    ) -> None:
        self._options = options
        self._caller = caller
        self._record = record
        self._order = order
        self._arrivals = arrivals
        self.errors: list[Exception] = []

    def announce(self, part: Part) -> None:
        """Adds a part to the answer, so that its heading can be shown."""
        is_alone = part.kind != "point" or part.needs or self._options.thoughts or self._arrivals
        part.is_compared = "loop" in self._options.profile.filters and not is_alone
        self._record.parts.append(part)
        for text in (part.text, None) if part.status else (part.text,):  # it may have ended by now
            self._tell(part, text)

    async def race(self, plain: Part, request_for: Callable[[Part], Request]) -> None:
        """Writes the plain answer beside the points; whole before these are read, it takes their place."""
        await self.write(plain, request_for)
        is_read = self._order.has_begun or self._record.is_plain or (self._arrivals and self._record.parts)
        if plain.status == "complete" and not plain.stopped_by and not is_read:
            self._record.parts.clear()  # at once: they end with the text they have, which is not to be read
            raise PlainInsteadError("the plain answer was whole before the points", plain)

    async def write(self, part: Part, request_for: Callable[[Part], Request]) -> None:
        """Writes ``part``, unless it is whole already.

        Its request is made once what it needs is written.

        Raises:
            PlainInsteadError: The call failed and the policy is ``"plain"``.
            Exception: The call failed and the policy is ``"raise"``.
        """
        if part.call is not None:  # it is being written
            await part.wait()
        if part.status is not None or (part.needs and not await self._has_what_it_needs(part)):
            return
        asked, name = request_for(part), f"point_{part.point.number}" if part.point else part.kind
        call = part.call = Call(name, "plain" if part.kind == "plain" else "points", begun=part.begun)
        self._record.calls.append(call)
        text = Pipeline(partial(self._filters, part, asked.conversation.question))
        try:
            await self._caller.make(call, asked, partial(self._take, part, text))
            self._add_rest(part, text, is_cut=call.is_cut_off)
            if part.is_compared and part.status is None:
                await self._settle(part)
        except Exception as error:  # the failure policy decides what happens to the part
            self._add_rest(part, text)
            self._fail(part, call, error)
        except asyncio.CancelledError:
            self._add_rest(part, text)
            if call.finish_reason is not None:  # it was whole, and waited for points before it
                self._end(part, call)
            raise
        else:
            part.stopped_by = part.stopped_by or _STOPPED_BY.get(type(text.ended_by))
            self._end(part, call)
        self._tell(part, None)

    def _take(self, part: Part, text: Pipeline, piece: str | None) -> bool:
        """Takes the next piece of ``part``; tells whether it is at its end."""
        if piece is None:
            part.pieces.clear()
            text.restart()
        elif new := text.feed(piece):
            part.pieces.append(new)
            self._tell(part, new)
        is_beside = self._record.is_outlined and part.kind == "plain" and not self._record.is_plain
        if is_beside and part.call and num_words(part.text) >= self._options.profile.short_answer:
            part.end("omitted", "the points are written")
        return text.ended_by is not None or part.status is not None

    async def _has_what_it_needs(self, part: Part) -> bool:
        """Waits for the parts that ``part`` builds on; if one of them has failed, so has it."""
        for needed in part.needs:
            await needed.wait()
        lacking = [needed for needed in part.needs if not needed.pieces or needed.has_failed]
        if not lacking or (part.kind == "conclusion" and len(lacking) < len(part.needs)):
            return True
        numbers = ", ".join(str(needed.point.number) for needed in lacking if needed.point)
        status: Status = "omitted" if lacking[0].status == "omitted" else "failed"
        part.end(status, f"it builds on {numbers}, of which there is no whole text")
        self._tell(part, None)
        return False

    def _filters(self, part: Part, question: str) -> list[TextFilter]:
        """The filters that the text of ``part`` passes through."""
        wanted, filters = self._options.profile.filters, list[TextFilter]()
        if part.point and "heading" in wanted:
            filters.append(HeadingFilter(part.point, question))
        if part.point and "overrun" in wanted:
            filters.append(OverrunFilter(part.point, self._record.skeleton.folded))
        if "loop" in wanted:
            filters.append(LoopGuard())
        bounds, enough = self._options.profile.points[self._options.detail], None
        if part.point and bounds.enough_words and not self._options.thoughts:
            num_later = max(0, (self._options.profile.max_points or 0) - part.point.number)
            enough = bounds.enough_words + num_later * bounds.more_words
        if part.kind != "plain" and bounds.max_tokens:
            filters.append(WholeSentences(enough))
        return filters

    async def _settle(self, part: Part) -> None:
        """Takes out what the points say that are read before ``part``, once they are written."""
        before = [one for one in self._record.parts[: self._record.parts.index(part)] if one.is_compared]
        text, said = part.text, dict[tuple[str, ...], int]()
        for one in before:
            await one.wait()
            without_repetitions(one.text, said)
            text = "" if are_alike(text, one.text) else text
        said[()] = 0  # between them and it
        if before and (new := without_repetitions(text, said)) != part.text:
            part.pieces[:] = filter(None, [new.strip()])
            part.stopped_by = "loop"

    def _end(self, part: Part, call: Call) -> None:
        """Ends a part whose call has ended well, with a whole text or the beginning of one."""
        if part.status is not None:
            return
        ended = f"it ended with {call.finish_reason!r}"
        if not part.pieces:
            status: Status = "failed" if part.kind == "plain" else "omitted"
            wrote = "what the other points say" if part.stopped_by == "loop" else f"nothing; {ended}"
            part.end(status, f"the model wrote {wrote}")
        elif part.stopped_by or not call.is_cut_off:
            part.end("complete")
        elif call.has_our_bound and call.is_out_of_tokens and ends_sentence(part.text):
            part.stopped_by = "length"
            part.end("complete")
        else:
            advice = "; raise max_tokens" if call.is_out_of_tokens else ""
            part.end("cut", f"the model was stopped before the end: {ended}{advice}")

    def _add_rest(self, part: Part, text: Pipeline, *, is_cut: bool = False) -> None:
        if rest := text.end(is_cut=is_cut):
            part.pieces.append(rest)
            self._tell(part, rest)

    def _tell(self, part: Part, text: str | None) -> None:
        if part not in self._record.parts:  # a plain answer on trial
            return
        if text and self._record.first_text_seconds is None:
            self._record.first_text_seconds = self._caller.now()
        if self._arrivals:
            self._arrivals((part, text))
            if text and part.call:
                part.call.is_read = True
        self._order.wake()

    def _fail(self, part: Part, call: Call, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if part.kind == "conclusion":  # the answer is one without it
            part.end("cut" if part.num_read else "omitted", reason)
            return
        part.has_failed = True
        self.errors.append(error)
        match self._options.policy(part.point, error):
            case "raise":
                raise error
            case "plain" if self._order.has_begun or self._arrivals:
                part.end("omitted", f"{error}; the answer has been read too far to be given plainly instead")
            case "plain":
                self._record.parts.clear()
                why = f"{call.name} failed, so the answer is plain: {error}"
                raise PlainInsteadError(why, Part(kind="plain"))
            case "omit":
                part.end("omitted", reason)
            case _:
                part.end("cut" if part.pieces else "failed", reason)
