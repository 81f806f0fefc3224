"""One answer being written: the two stages of Skeleton-of-Thought (arXiv 2307.15337, section 2.1).

This is the algorithm. It knows providers, prompts and points; it does not know Runnables or chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import RunnableConfig

from sot_chains.answering.budgeting import BudgetPlanner
from sot_chains.answering.point_tasks import PointTask
from sot_chains.answering.point_writer import EVERYWHERE, Arrival, Late, PointWriter, Refused
from sot_chains.answering.reading_order import Arrivals, ReadingOrder
from sot_chains.answering.record import AnswerRecord
from sot_chains.answering.requests import Plan, Requests, in_groups
from sot_chains.calls.model_call import Caller
from sot_chains.calls.options import CallOptions, SotOptions
from sot_chains.calls.trace import Call, PointState, SotTrace
from sot_chains.providers.base import DeadlineError, ProviderError, SharedPrefix
from sot_chains.text.conversation import Conversation
from sot_chains.text.reply_text import AnswerRenderer
from sot_chains.text.skeleton import GrowingSkeleton, OutlineReply, Point, Skeleton, skeleton_of

_FEWEST_POINTS = 2


class PointDelta(NamedTuple):
    """Text that has just been written.

    Attributes:
        point: The point it belongs to; ``None`` where the model answers plainly, in one piece.
        text: What was added; ``""`` to say that the point exists and is being written.
    """

    point: Point | None
    text: str


class Answer:
    """The answer to one question. Written once, by reading :meth:`in_reading_order` to its end."""

    def __init__(self, method: SotOptions, conversation: Conversation, setting: CallOptions) -> None:
        self._method = method
        self._conversation = conversation
        self._setting = setting
        self._requests = Requests(method, conversation)
        self._caller = Caller(method, setting)
        self._record = AnswerRecord(method)
        self._arrivals: Arrivals[Arrival] = Arrivals()
        self._order: ReadingOrder[str] = ReadingOrder()
        self._writers = PointWriter(
            method,
            self._caller,
            self._record,
            self._arrivals,
            is_watched=setting.is_watched,
            forget=self._forget,
        )
        self._funding = (
            BudgetPlanner(method, method.budget, self._caller, self._requests) if method.budget else None
        )
        self._units: list[PointTask] = []
        self._held: list[Arrival] = []  # from points that may yet turn out to be none
        self._num_open = 0
        self._num_settled = 0  # places that are sure to stay
        self._is_outlined = False
        self._is_late = False
        self._has_shown = False
        self._shows_at_once = False
        self.message_id = setting.message_id

    async def in_reading_order(
        self, on_arrival: Callable[[PointDelta], None] | None = None
    ) -> AsyncGenerator[str, None]:
        """Writes the answer and yields its text from first to last, each piece as early as it can be read.

        Where nobody watches, nothing is yielded; the text is in :meth:`message`.

        Args:
            on_arrival: Called with each piece as it is written, which is in no order across points.

        Raises:
            DeadlineError: The deadline passed before there was anything to return.
            ProviderError: Nothing could be written. Its ``trace`` holds what had been paid for.
        """
        self._shows_at_once = on_arrival is not None
        is_watched = self._setting.is_watched
        layout = AnswerRenderer(self._requests.templates.separator)
        alarm = self._set_alarm()
        try:
            try:
                # 1. An outline, and with it the route;
                # 2. all of its points at once, or else the plain answer.
                await self._begin()
                while self._num_open or not self._is_outlined:
                    # 3. Put together in reading order.
                    position, arrived = await self._arrivals.get()
                    if not isinstance(arrived, str | None):
                        await self._hear(arrived)
                        continue
                    if position >= self._num_settled:
                        self._held.append((position, arrived))
                        continue
                    self._num_open -= arrived is None
                    if on_arrival and arrived is not None:
                        on_arrival(PointDelta(self._record.places[position].point, arrived))
                    for place, piece in self._order.arrive(position, arrived) if is_watched else ():
                        if piece is not None and (visible := self._visible(layout, place, piece)):
                            yield visible
                self._raise_if_nothing()
            finally:
                if alarm:
                    alarm.cancel()
                await self._writers.crew.stop()
                self._record.seconds = self._caller.now()
                if self._funding:
                    self._funding.settle(self._record.used())
        except ProviderError as error:
            error.trace = self._record.trace()
            raise

    def message(self) -> AIMessage:
        """The finished answer."""
        shown = [place for place in self._record.places if place.status != "omitted"]
        layout = AnswerRenderer(self._requests.templates.separator)
        text = layout.whole((place.point, place.text) for place in shown)
        return AIMessage(content=text, **self._record.particulars(self.message_id))

    def last_chunk(self) -> AIMessageChunk:
        """What a stream of the text ends with: all there is besides the text."""
        particulars = self._record.particulars(self.message_id)
        return AIMessageChunk(content="", chunk_position="last", **particulars)

    # --- the first stage

    async def _begin(self) -> None:
        is_eager = self._method.eager and self._funding is None and self._setting.resume is None
        if is_eager and self._conversation.ends_with_question:
            self._writers.crew.start(self._outline_meanwhile())
        elif self._setting.deadline_seconds is None:
            await self._outline()
        else:
            try:
                async with asyncio.timeout(self._setting.deadline_seconds):
                    await self._outline()
            except TimeoutError as error:
                raise self._too_late("there was an outline") from error

    async def _outline_meanwhile(self) -> None:
        try:
            await self._outline()
        except Exception as error:  # whoever reads the answer raises it
            self._arrivals.put((EVERYWHERE, error))

    async def _outline(self) -> None:
        resume = self._setting.resume
        if resume is not None and resume["skeleton_reply"] is not None and resume["points"]:
            self._take_up(resume)
        elif not self._conversation.ends_with_question:
            self._decide(Skeleton(), "the conversation does not end with a question of the user")
        elif self._funding and not await self._funding.allows_outline():
            self._decide(Skeleton(), "the budget is too small for an outline and its points")
        elif reason := await self._reason_for_plain():
            self._decide(Skeleton(), reason)
        else:
            call = self._record.skeleton_call = self._record.begin(Call("skeleton", "skeleton"))
            is_eager = self._method.eager and self._funding is None
            reply = OutlineReply(self._growing_skeleton, self._grow if is_eager else None, self._ungrow)
            await self._caller.make(call, self._requests.skeleton_task(), reply)
            self._record.skeleton_reply = reply.text
            self._record.plain_share = self._requests.plain_share()
            start = self._requests.skeleton_reply_start
            self._decide(skeleton_of(reply.text, start, self._method.max_points))

    async def _reason_for_plain(self) -> str | None:
        """Why the router wants a plain answer; ``None`` if it does not, or if there is none."""
        if self._method.router is None:
            return None
        config = RunnableConfig(**{**self._setting.config, "run_name": "route"})
        route = await self._method.router.ainvoke(list(self._conversation.messages), config)
        return None if route.use_sot else f"{route.router} router: {route.reason}"

    def _decide(self, skeleton: Skeleton, reason: str | None = None) -> None:
        """Takes the route, and starts what it needs and what has not been started yet."""
        points = skeleton.points if len(skeleton) >= _FEWEST_POINTS else ()
        plan = Plan(points, self._method.points_per_call)
        if reason is None:
            found = f"{len(skeleton) or 'no'} usable points, fewer than {_FEWEST_POINTS}"
            reason = f"the skeleton has {f'{len(points)} points' if points else found}"
        if self._funding:
            plan = self._funding.choose(plan, skeleton)
            if plan.change:
                reason = f"{reason}; {plan.change}"
            if plan.points:
                skeleton = skeleton.first(len(plan.points))
        self._record.skeleton = skeleton
        self._record.route_reason = reason
        self._drop_from(self._num_agreed(plan.points))
        if plan.points:
            rest = plan.points[len(self._record.places) :]
            groups = in_groups(rest, plan.points_per_call)
            prefix = None if self._method.eager else self._requests.shared_prefix(skeleton, groups)
            for group in groups:
                self._start(group, skeleton, prefix)
        else:
            self._start_plainly()
        self._settle(len(self._record.places))
        self._is_outlined = True

    def _take_up(self, resume: SotTrace) -> None:
        """Goes on with an earlier answer: what is whole stays, the rest is written."""
        skeleton = Skeleton.of(resume["skeleton"])
        self._record.skeleton, self._record.skeleton_reply = skeleton, resume["skeleton_reply"]
        whole = {point["number"]: point for point in resume["points"] if point["status"] == "complete"}
        missing = tuple(point for point in skeleton if point.number not in whole)
        self._record.route_reason = f"taken up again: {len(missing)} of {len(skeleton)} points were missing"
        if self._funding and missing:
            self._funding.choose(Plan(missing, self._method.points_per_call), skeleton)
        prefix = self._requests.shared_prefix(skeleton, [[point] for point in missing])
        for point in skeleton:
            if (earlier := whole.get(point.number)) is None:
                self._start([point], skeleton, prefix)
                continue
            place = PointState(point, pieces=[earlier["text"]], resumed=earlier, is_ended=True)
            self._record.places.append(place)
            position = len(self._record.places) - 1
            self._num_open += 1
            self._arrivals.put((position, earlier["text"]))
            self._arrivals.put((position, None))
        self._settle(len(skeleton))
        self._is_outlined = True

    # --- starting points while the outline is written

    def _growing_skeleton(self) -> GrowingSkeleton:
        return GrowingSkeleton(self._requests.skeleton_reply_start, self._method.max_points)

    def _grow(self, skeleton: Skeleton) -> None:
        """Starts the points whose lines are complete, in a skeleton that ends with them."""
        self._drop_from(self._num_agreed(skeleton.points))
        size = self._method.points_per_call
        for group in in_groups(skeleton.points[len(self._record.places) :], size):
            if len(group) == size:
                self._start(group, skeleton, None)
        # The last point may yet be gone on with on the next line, and the only one be none at all.
        if len(skeleton) >= _FEWEST_POINTS:
            self._settle(min(len(skeleton) - 1, len(self._record.places)))

    def _ungrow(self) -> bool:
        """The outline is asked for again: what it began is dropped, unless it has been read."""
        if self._has_shown or (self._shows_at_once and self._num_settled):
            return False
        self._num_settled = 0
        self._drop_from(0)
        return True

    def _num_agreed(self, points: tuple[Point, ...]) -> int:
        """How many places hold the point that ``points`` has there. Settled ones stay as they are."""
        places = self._record.places
        num = self._num_settled
        while num < min(len(places), len(points)) and places[num].point == points[num]:
            num += 1
        return num

    def _drop_from(self, num_kept: int) -> None:
        while self._units and self._units[-1].positions[-1] >= num_kept:
            unit = self._units.pop()
            self._writers.drop(unit)
            self._held = [one for one in self._held if one[0] not in unit.positions]
            del self._record.places[unit.positions[0] :]
            self._num_open -= len(unit.positions)

    def _settle(self, num_places: int) -> None:
        if num_places > self._num_settled:
            self._num_settled = num_places
            if self._held:
                self._arrivals.put_back(self._held)
                self._held = []

    # --- the second stage

    def _start(self, points: Sequence[Point], skeleton: Skeleton, prefix: SharedPrefix | None) -> None:
        begin = len(self._record.places)
        self._record.places += [PointState(point) for point in points]
        positions = list(range(begin, begin + len(points)))
        self._num_open += len(positions)
        if self._setting.is_watched:
            for position in positions:
                self._arrivals.put((position, ""))  # it exists
        elif self._record.first_text_seconds is None:
            self._record.first_text_seconds = self._caller.now()
        unit = self._requests.unit(positions, points, skeleton, prefix)
        self._units.append(unit)
        self._writers.start(unit)

    def _start_plainly(self) -> None:
        self._record.is_plain = True
        self._record.places = [PointState(None)]
        self._num_open += 1
        self._writers.start(PointTask([0], (), self._requests.plain))

    async def _hear(self, said: Refused | Late | Exception) -> None:
        """Something that concerns the whole answer has happened."""
        match said:
            case Late():
                await self._cut_short()
            case Refused(policy="plain") if not self._has_shown and not self._shows_at_once:
                await self._turn_to_plain(said)
            case Refused(policy="plain"):
                reason = f"{said.error}; the answer has been read too far to be given plainly instead"
                self._writers.give_up(said.unit, reason, omit=True)
            case Refused():
                raise said.error
            case _:
                raise said

    async def _turn_to_plain(self, refused: Refused) -> None:
        await self._writers.crew.stop()
        self._arrivals.forget(lambda arrival: True)
        self._order = ReadingOrder()
        self._units, self._held, self._num_open = [], [], 0
        self._record.route_reason = f"{refused.unit.name} failed, so the answer is plain: {refused.error}"
        self._start_plainly()
        self._num_settled, self._is_outlined = 1, True

    async def _cut_short(self) -> None:
        """The deadline has passed: what is there is the answer."""
        self._is_late = True
        await self._writers.crew.stop()
        if not self._is_outlined:
            if len(self._record.places) < _FEWEST_POINTS:
                raise self._too_late("there was an outline")
            self._record.is_cut = self._is_outlined = True
            self._record.skeleton = Skeleton(tuple(p.point for p in self._record.places if p.point))
            self._record.route_reason = "the outline was cut at the deadline"
        reason = f"the deadline of {self._setting.deadline_seconds} s passed"
        for position, place in enumerate(self._record.places):
            if not place.is_ended:
                place.status, place.reason, place.is_ended = "cut" if place.pieces else "failed", reason, True
                self._arrivals.put((position, None))
        self._settle(len(self._record.places))

    def _raise_if_nothing(self) -> None:
        places = self._record.places
        if any(place.pieces for place in places):
            return
        if self._is_late and self._record.is_plain:
            raise self._too_late("the model wrote anything")
        if self._writers.errors and not self._is_late and all(p.status != "complete" for p in places):
            raise self._writers.errors[-1]

    def _visible(self, layout: AnswerRenderer, position: int, piece: str) -> str:
        """What ``piece``, whose turn it is, adds to the text."""
        place = self._record.places[position]
        if place.status == "omitted" and not place.pieces:
            return ""
        visible = layout.add(place.point, piece)
        if visible:
            self._has_shown = True
            if self._record.first_text_seconds is None:
                self._record.first_text_seconds = self._caller.now()
        return visible

    def _forget(self, unit: PointTask) -> bool:
        """Takes back the text of ``unit``, unless it has been read."""
        if not self._setting.is_watched:
            return True
        if self._shows_at_once or any(self._order.is_read(position) for position in unit.positions):
            return False
        self._arrivals.forget(lambda arrival: arrival[0] in unit.positions and arrival[1] != "")
        self._held = [one for one in self._held if one[0] not in unit.positions or one[1] == ""]
        for position in unit.positions:
            self._order.forget(position)
        return True

    # --- the deadline

    def _set_alarm(self) -> asyncio.TimerHandle | None:
        seconds = self._setting.deadline_seconds
        return None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._ring)

    def _ring(self) -> None:
        self._writers.crew.cancel()  # at once, even if nobody is reading just now
        self._arrivals.put((EVERYWHERE, Late()))

    def _too_late(self, what: str) -> DeadlineError:
        seconds = self._setting.deadline_seconds
        return DeadlineError(f"the deadline of {seconds:g} s passed before {what}; raise deadline_seconds")
