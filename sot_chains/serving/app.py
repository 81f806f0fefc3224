"""``create_app``: the server as an ASGI application, who may use it, and the page on which its modes race.

A race is a stream of events with what each lane writes; the last one is the finished run as a document.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import Runnable
from pydantic import Field
from sse_starlette.sse import AppStatus
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sot_chains.aio.blocking import gather_or_cancel
from sot_chains.calls.usage import Price, count_tokens
from sot_chains.chain import SkeletonOfThought
from sot_chains.prompts.profile import ModelProfile
from sot_chains.providers import Provider, close_clients
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.rendering import TEMPLATES, Lane, Run, make_lane
from sot_chains.serving import stream
from sot_chains.serving.answer import Answer, Answers
from sot_chains.serving.loading import Copying
from sot_chains.serving.modes import ServedModel
from sot_chains.serving.schema import Body, RefusedError, read_body_as
from sot_chains.serving.service import PROBES, Service, bearer_key

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
        lanes = {name: _TITLES[name] for name in _lanes(service.served)}
        needs_key = service.api_key is not None or service.with_key is not None
        told = {"model": service.name, "lanes": lanes, "in_turn": service.in_turn, "needs_key": needs_key}
        return stream.json_response(told)

    async def race(self, request: Request) -> Response:
        """Answers a question in all modes, as a stream of what each of them writes."""
        service = self._service
        body = await stream.read_body(request, service.max_body_bytes, service.pace)
        asked, served = read_body_as(_Asked, body), service.served_for(request)
        in_turn = service.in_turn if asked.in_turn is None else asked.in_turn
        write = partial(self._race, asked.question, served, in_turn)
        return await stream.event_response(request, write, service.pace)

    async def _race(self, question: str, served: ServedModel, in_turn: bool, send: stream.Send) -> None:
        lanes = _lanes(served)
        limits = {"max_tokens": _MAX_TOKENS} if isinstance(served.provider, LangChainProvider) else {}
        turn = asyncio.Semaphore(1 if in_turn else len(lanes))

        def tell(kind: str, **event: Any) -> None:
            send(stream.make_event(event, kind))

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


_MAX_BODY_BYTES = 8_000_000
_MAX_KEYS = 256


def create_app(
    model: str | Runnable[Any, Any] | Provider,
    *,
    name: str | None = None,
    copying: Copying | None = None,
    model_for_key: Callable[[str], str | Runnable[Any, Any] | Provider] | None = None,
    api_key: str | None = None,
    prices: Mapping[str, Price] | Price | None = None,
    profile: ModelProfile | Literal["small", "strong"] | None = None,
    host: str = "127.0.0.1",
    max_body_bytes: int = _MAX_BODY_BYTES,
    client_timeout_seconds: float = 60.0,
    in_turn: bool = False,
    allow: Sequence[str] = (),
) -> Starlette:
    """The server for one model, an ASGI application.

    Args:
        model: What :class:`~sot_chains.SkeletonOfThought` takes.
        name: The model's name for clients; by default its own. Beside ``NAME`` there are ``NAME:sot`` and
            ``NAME:auto``, and ``NAME:copy`` with a folder.
        copying: References and citations, if the package for them is installed.
        model_for_key: Makes the model for the key that a client sends, if the server has none.
        api_key: The key that clients must send; ``None`` for none.
        prices: What the model costs, for the page.
        profile: How the model is asked, as for :class:`~sot_chains.SkeletonOfThought`.
        host: Where the server will listen. On loopback only names of this machine are allowed as host.
        max_body_bytes: The longest body of a request.
        client_timeout_seconds: How long a client may take to send a body, or to read what is sent to it.
        in_turn: Whether the page uses one mode after the other, for modes that share a processor.
        allow: Origins whose pages may ask (``"tauri://localhost"``), and further names of this server
            (``"my-container"``); ``"*"`` for all.
    """
    allow = [one.rstrip("/") for one in allow]  # as browsers write them
    serve = partial(ServedModel, copying=copying, prices=prices, profile=profile)
    served = serve(model)
    service = Service(
        name=name or served.provider.model_name,
        served=served,
        with_key=lru_cache(_MAX_KEYS)(lambda key: serve(model_for_key(key))) if model_for_key else None,
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        pace=stream.Pace(client_timeout_seconds),
        in_turn=in_turn,
    )
    errors = (RefusedError, HTTPException, ClientDisconnect, Exception)
    return Starlette(
        routes=[*service.routes, *PageRoutes(service).routes],
        middleware=[
            # Outside of the guard: what a browser asks before a request carries no key.
            *([Middleware(CORSMiddleware, allow_origins=allow, **_HEADERS["cors"])] if allow else []),
            Middleware(Guard, api_key=api_key, host=host, allow=allow),
        ],
        exception_handlers=dict.fromkeys(errors, service.refuse),
        lifespan=_lifespan,
    )


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    AppStatus.should_exit = False  # still set if an earlier server in this process was interrupted
    yield
    await close_clients()


_HEADERS = tomllib.loads(Path(__file__).with_name("headers.toml").read_text("utf-8"))
_SECURITY = [(name.encode(), value.encode()) for name, value in _HEADERS["security"].items()]


class Guard:
    """Allows requests with the key, to a name of this server, and not from another site's page."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, host: str, allow: Sequence[str]) -> None:
        self._app = app
        self._key = api_key.encode() if api_key else None
        # A name that resolves to this machine may belong to another site (DNS rebinding).
        names = (urlsplit(one if "//" in one else f"//{one}").hostname for one in allow)
        self._names = {host, "localhost", *names} if is_loopback(host) and "*" not in allow else None
        self._allow = frozenset(allow)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on a request, or refuses it."""

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *_SECURITY]}
            await send(message)

        try:
            if scope["type"] == "http":
                scope["path"] = re.sub("/+", "/", scope["path"]).rstrip("/") or "/"
                self._check(scope["path"], Headers(scope=scope))
        except RefusedError as error:
            await stream.error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send_secured)

    def _check(self, path: str, headers: Headers) -> None:
        name = urlsplit(f"//{headers.get('host', '')}").hostname or ""  # browsers say it, monitors need not
        if self._names is not None and name and name not in self._names and not is_loopback(name):
            raise RefusedError(f"Host header {name!r} is not allowed; see sot serve --allow", 403)
        origin = headers.get("origin")
        is_own = not origin or urlsplit(origin).netloc == headers.get("host")
        if not is_own and not self._allow & {origin, "*"}:
            raise RefusedError(f"requests from pages of {origin} are not allowed; see sot serve --allow", 403)
        if self._key is None or path in OPEN_PATHS:
            return
        if not hmac.compare_digest(bearer_key(headers).encode("latin-1"), self._key):  # the bytes sent
            message = "the API key is missing or wrong; send the server's --api-key as a bearer token"
            raise RefusedError(message, 401, code="invalid_api_key")


def is_loopback(name: str) -> bool:
    """Whether ``name`` is one of this machine for itself."""
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost"
