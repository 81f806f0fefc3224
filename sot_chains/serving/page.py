"""The page on which the modes of one model race, and what its script asks for.

A race is a stream of events with what each lane writes; the last one is the finished run as a document.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from langchain_core.messages import AIMessage, HumanMessage
from pydantic import Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from sot_chains.aio.tasks import gather_or_cancel
from sot_chains.calls.usage import count_tokens
from sot_chains.chain import SkeletonOfThought
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.rendering import TEMPLATES, Lane, Run, make_lane
from sot_chains.serving.answer import Answer, Answers
from sot_chains.serving.modes import ServedModel
from sot_chains.serving.schema import Body, RefusedError, read_body_as
from sot_chains.serving.service import PROBES, Service
from sot_chains.serving.stream import Send, event_response, json_response, make_event

_STATIC = Path(__file__).with_name("static")
_FILES = {
    "/": _STATIC / "race.html",
    "/race.css": _STATIC / "race.css",
    "/race.js": _STATIC / "race.js",
    "/style.css": TEMPLATES / "style.css",
}
OPEN_PATHS = frozenset({*_FILES, "/about", *PROBES})
_TITLES = {"plain": "Plain decoding", "sot": "Skeleton-of-Thought", "copy": "Copying from the folder"}
_MAX_TOKENS = 512  # of a LangChain model's answer in one piece: a small one may repeat itself without end
Tell: TypeAlias = Callable[..., None]  # takes an event: its kind, and what it says


class _Asked(Body):
    question: str = Field(min_length=1, max_length=20_000, pattern=r"\S")
    in_turn: bool | None = None


class PageRoutes:
    """The page's routes for one served model."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes = [
            *(Route(path, partial(_file, file)) for path, file in _FILES.items()),
            Route("/about", self.about),
            Route("/race", self.race, methods=["POST"]),
        ]

    async def about(self, request: Request) -> Response:
        """What the page needs to know of this server."""
        service = self._service
        return json_response(
            {
                "model": service.name,
                "lanes": {name: _TITLES[name] for name in _lanes(service.served)},
                "in_turn": service.in_turn,
                "needs_key": service.api_key is not None or service.with_key is not None,
            }
        )

    async def race(self, request: Request) -> Response:
        """Answers a question in all modes, as a stream of what each of them writes."""
        asked = read_body_as(_Asked, await self._service.body(request))
        served = self._service.served_for(request)
        in_turn = self._service.in_turn if asked.in_turn is None else asked.in_turn
        write = partial(self._race, asked.question, served, in_turn)
        return await event_response(request, write, self._service.pace)

    async def _race(self, question: str, served: ServedModel, in_turn: bool, send: Send) -> None:
        lanes = _lanes(served)
        limits = {"max_tokens": _MAX_TOKENS} if isinstance(served.provider, LangChainProvider) else {}
        turn = asyncio.Semaphore(1 if in_turn else len(lanes))

        def tell(kind: str, **event: Any) -> None:
            send(make_event(event, kind))

        async def enter(name: str) -> Lane:
            async with turn:
                parameters = {} if name == "sot" else limits
                return await _run_lane(name, served, question, parameters, partial(tell, lane=name))

        with self._service.metrics.request("page"):
            finished = await gather_or_cancel(map(enter, lanes))
            run = Run(question, self._service.name, tuple(finished))
            tell("end", fragment=run.fragment(), page=run.page())


async def _file(file: Path, request: Request) -> Response:
    return FileResponse(file)


def _lanes(served: ServedModel) -> dict[str, Answers]:
    lanes: dict[str, Answers] = {"plain": served.guarded, "sot": served.sot}  # under the same guards
    return {**lanes, "copy": served.copy} if served.copy else lanes


async def _run_lane(
    name: str, served: ServedModel, question: str, parameters: dict[str, Any], tell: Tell
) -> Lane:
    answers = _lanes(served)[name]
    tell("start")
    try:
        write = _by_points if isinstance(answers, SkeletonOfThought) else _in_one_piece
        message, *times = await write(answers, question, parameters, tell)
        lane = make_lane(name, _TITLES[name], message, *times)
        if lane.price is None and served.price:
            lane = replace(lane, price=served.price.of(count_tokens(message.usage_metadata)))
    except Exception as error:  # whatever a model raises is shown in its lane
        lane = Lane(name, _TITLES[name], f"It failed: {RefusedError.from_error(error)}")
    tell("done", seconds=lane.seconds, note=lane.note)
    return lane


async def _by_points(chain: Any, question: str, parameters: dict[str, Any], tell: Tell) -> tuple[Any, ...]:
    async with aclosing(chain.astream_points(question, **parameters)) as deltas:
        async for point, text in deltas:
            number = point.number if point else 0
            if text:
                tell("text", point=number, text=text)
            else:
                tell("point", point=number, heading=f"{number}. {point.text}" if point else "")
    return (deltas.message,)


async def _in_one_piece(
    answers: Answers, question: str, parameters: dict[str, Any], tell: Tell
) -> tuple[Any, ...]:
    begin, first_text = time.perf_counter(), None
    answer = Answer(answers, [HumanMessage(question)], parameters)
    tell("point", point=0, heading="")
    async with aclosing(answer.stream()) as pieces:
        async for text, _ in pieces:
            first_text = first_text or time.perf_counter() - begin
            tell("text", point=0, text=text)
    message = AIMessage(answer.text, usage_metadata=answer.usage, response_metadata=answer.metadata)
    return message, time.perf_counter() - begin, first_text
