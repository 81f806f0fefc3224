"""The page on which the ways of one model race, and what its script asks for.

A race is a stream of events: what each lane writes, as it is written. The finished run is a document that
the same server has made, so that there is one rendering: the script takes the lanes from it, and the link
below them gives it away as a file.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import Response

from sot_chains.aio.tasks import cancel_and_wait, gather_or_cancel
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.rendering import STYLE, Lane, Run
from sot_chains.serving.connection import EventReply
from sot_chains.serving.protocol import RefusedError
from sot_chains.serving.race import TITLES, Racer
from sot_chains.serving.service import Service
from sot_chains.serving.ways import Answers, ServedModel

_STATIC = Path(__file__).with_name("static")
_FILES = {"/race.css": "text/css", "/race.js": "text/javascript", "/": "text/html"}
OPEN_PATHS = frozenset({*_FILES, "/style.css", "/about", "/health"})
_MOST_RUNS = 64
_MAX_TOKENS = 512  # of a LangChain model's answer in one piece: a small one may repeat itself without end


class _Asked(BaseModel):
    """What the script sends."""

    question: str = Field(min_length=1, max_length=20_000)
    in_turn: bool | None = None


class PageRoutes:
    """The page's routes.

    Args:
        service: The model, and what is allowed.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._runs: OrderedDict[str, Run] = OrderedDict()

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to ``app``."""
        for path, kind in _FILES.items():
            content = (_STATIC / (path.removeprefix("/") or "race.html")).read_bytes()
            route = self._content(content, kind)
            app.add_api_route(path, route, methods=["GET"], include_in_schema=False)
        style = self._content(STYLE.encode(), "text/css")
        app.add_api_route("/style.css", style, methods=["GET"], include_in_schema=False)
        app.add_api_route("/about", self.about, methods=["GET"], include_in_schema=False)
        app.add_api_route("/race", self.race, methods=["POST"], response_model=None)
        app.add_api_route("/runs/{run}.html", self.file, methods=["GET"], response_model=None)
        app.add_api_route("/runs/{run}", self.fragment, methods=["GET"], response_model=None)

    def _content(self, content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
        async def route() -> Response:
            return Response(content, media_type=kind)

        return route

    async def about(self) -> dict[str, Any]:
        """What the page needs to know of this server."""
        service = self._service
        return {
            "model": service.name,
            "lanes": {name: TITLES[name] for name in self._lanes(service.served)},
            "in_turn": service.in_turn,
            "needs_key": service.api_key is not None or service.of_key is not None,
        }

    async def file(self, run: str) -> Response:
        """A finished run as a file of its own."""
        headers = {"content-disposition": 'attachment; filename="sot-run.html"'}
        return self._html(self._run(run).page(), headers)

    async def fragment(self, run: str) -> Response:
        """A finished run as a part of the page."""
        return self._html(self._run(run).fragment(), {})

    def _run(self, name: str) -> Run:
        if name not in self._runs:
            raise RefusedError("there is no such run here any more; runs are kept for a while", status=404)
        return self._runs[name]

    def _html(self, text: str, headers: dict[str, str]) -> Response:
        body = text.encode("utf-8", "replace")  # half an emoji is not taken
        return Response(body, headers={**headers, "cache-control": "no-store"}, media_type="text/html")

    async def race(self, request: Request) -> Response:
        """Answers a question in all ways, as a stream of what each of them writes."""
        try:
            asked = _Asked.model_validate_json(await self._service.body(request))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise RefusedError(f"the question cannot be read: {first['msg']}", param="question") from None
        if not asked.question.strip():
            raise RefusedError("the question is empty", param="question")
        served = self._service.served_for(request)
        in_turn = self._service.in_turn if asked.in_turn is None else asked.in_turn
        events = self._events(asked.question, served, in_turn=in_turn)
        return EventReply(events, self._service.pace)

    def _lanes(self, served: ServedModel) -> dict[str, Answers]:
        lanes: dict[str, Answers] = {"plain": served.plain, "sot": served.sot}
        if served.copy:
            lanes["copy"] = served.copy
        return lanes

    async def _events(
        self, question: str, served: ServedModel, *, in_turn: bool
    ) -> AsyncGenerator[bytes | str, None]:
        lanes = self._lanes(served)
        bounds = {"max_tokens": _MAX_TOKENS} if isinstance(served.provider, LangChainProvider) else {}
        said: asyncio.Queue[bytes | None] = asyncio.Queue()

        def tell(kind: str, event: dict[str, Any]) -> None:
            said.put_nowait(f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode())

        async def race() -> None:
            one_at_a_time = asyncio.Semaphore(1 if in_turn else len(lanes))

            async def enter(name: str) -> Lane:
                async with one_at_a_time:
                    given = {} if name == "sot" else bounds
                    racer = Racer(name, TITLES[name], lanes[name], given, tell, served.price)
                    return await racer.run(question)

            finished = await gather_or_cancel(map(enter, lanes))
            run = self._keep(Run(question, self._service.name, tuple(finished)))
            tell("end", {"run": f"/runs/{run}"})

        with self._service.metrics.request("page") as counted:
            racing = asyncio.create_task(race())
            racing.add_done_callback(lambda _: said.put_nowait(None))
            try:
                while (event := await said.get()) is not None:
                    yield event
                racing.result()
                counted.status = 200
            finally:
                await cancel_and_wait([racing])

    def _keep(self, run: Run) -> str:
        name = secrets.token_urlsafe(16)
        self._runs[name] = run
        while len(self._runs) > _MOST_RUNS:
            self._runs.popitem(last=False)
        return name
