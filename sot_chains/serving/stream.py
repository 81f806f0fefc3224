"""One connection: bodies with a limit, and replies whose work ends with their reader. Knows no models."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from anyio import CancelScope
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette import types
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sot_chains.aio.blocking import cancel_and_wait
from sot_chains.serving.schema import RefusedError, with_whole_characters

T = TypeVar("T")
Send: TypeAlias = Callable[[bytes | str], None]  # takes an event, or a piece of text

_MAX_SILENT_SECONDS = 0.5  # then a stream is begun: proxies and clients give up on one without headers
_COMMENT = b": the model is at work\n\n"
_MIN_PACKET_SECONDS = 0.02  # events that come within it are sent together: a packet costs more than a token
_MAX_PACKETS_PER_SECOND = 1000  # to all readers together: some tenth of a core


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Awaits ``work``; cancels it and raises ``ClientDisconnect`` if the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        await cancel_and_wait([working, leaving])


async def read_body(request: Request, max_bytes: int, pace: Pace) -> bytes:
    """Reads the body of a request, or refuses it if it is too long or does not arrive in time."""
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise RefusedError(f"bodies with the content-encoding {coding[:80]!r} are not supported", 415)
    body = bytearray()
    try:
        async with asyncio.timeout(pace.timeout_seconds):
            async for part in request.stream():  # to its end: who is still sending does not read a reply
                body += part[: max_bytes + 1 - len(body)]
    except TimeoutError:
        raise RefusedError(f"the body has not arrived within {pace.timeout_seconds:g} s", 408) from None
    if len(body) > max_bytes:
        raise RefusedError(f"the body is longer than the limit of {max_bytes} bytes", 413)
    return bytes(body)


@dataclass
class Pace:
    """How often readers are sent what is written for them, and how long they may take."""

    timeout_seconds: float = 60.0  # for a reader to take what is sent to it
    num_readers: int = 0  # streams that are being read

    @property
    def seconds(self) -> float:
        """The time from one packet of a stream to the next. More readers get fewer and larger ones."""
        return max(_MIN_PACKET_SECONDS, self.num_readers / _MAX_PACKETS_PER_SECOND)


def make_event(data: Any, kind: str = "") -> bytes:
    """A server-sent event with ``data`` in JSON."""
    head = f"event: {kind}\n" if kind else ""
    return with_whole_characters(f"{head}data: {json.dumps(data)}\n\n".encode())


class Writer:
    """The format of a stream; this one sends text as it is."""

    def text(self, text: str) -> bytes:
        """An event with a piece of text."""
        return text.encode()

    def failed(self, error: RefusedError) -> bytes:
        """An error in the middle of the stream."""
        return make_event(error.body())


_AS_IT_IS = Writer()


async def packets(
    write: Callable[[Send], Coroutine[Any, Any, None]], pace: Pace, writer: Writer = _AS_IT_IS
) -> AsyncGenerator[bytes, None]:
    """Joins events that come within ``pace.seconds``; the first one is passed on at once.

    ``write`` runs in a task and calls its argument with events, or with pieces of text, which are joined to
    one event. An error before the first packet is raised; a later one is an event.
    """
    waiting: list[bytes | str] = []
    loop, next_at, has_news = asyncio.get_running_loop(), 0.0, asyncio.Event()

    def send(event: bytes | str) -> None:
        if not waiting:
            loop.call_at(next_at, has_news.set)
        if isinstance(event, str) and waiting and isinstance(last := waiting[-1], str):
            waiting[-1] = last + event
        else:
            waiting.append(event)

    def comment() -> None:
        if not waiting and not next_at:
            send(_COMMENT)

    commenting = loop.call_later(_MAX_SILENT_SECONDS, comment)
    writing = asyncio.create_task(write(send))
    writing.add_done_callback(lambda _: has_news.set())
    pace.num_readers += 1
    try:
        while waiting or not writing.done():
            await has_news.wait()
            has_news.clear()
            if waiting:
                packet = b"".join(one if isinstance(one, bytes) else writer.text(one) for one in waiting)
                waiting.clear()
                next_at = loop.time() + pace.seconds
                yield packet
        try:
            writing.result()
        except RefusedError as error:
            if not next_at:
                raise
            yield writer.failed(error)
    finally:
        pace.num_readers -= 1
        commenting.cancel()
        with CancelScope(shield=True):  # the response is cancelled by anyio, which would cancel this, too
            await cancel_and_wait([writing])


class _EventResponse(EventSourceResponse):
    """Server-sent events, which end if the client disconnects or does not read."""

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        with contextlib.suppress(SendTimeoutError):
            await super().__call__(scope, receive, send)


async def event_response(
    request: Request,
    write: Callable[[Send], Coroutine[Any, Any, None]],
    pace: Pace,
    writer: Writer = _AS_IT_IS,
) -> Response:
    """Sends :func:`packets` of events once there is the first: an error before it has a status of its own."""
    sent = packets(write, pace, writer)
    first = await while_connected(request, anext(sent))

    async def all_packets() -> AsyncGenerator[bytes, None]:
        async with aclosing(sent):
            yield first
            async for packet in sent:
                yield packet

    return _EventResponse(all_packets(), sep="\n", send_timeout=pace.timeout_seconds)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A reply in JSON."""
    body = with_whole_characters(json.dumps(content).encode())
    return Response(body, status, headers, media_type="application/json")


def error_response(error: RefusedError) -> Response:
    """The reply to a request that is not answered."""
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(round(error.retry_after_seconds + 0.5))
    return json_response(error.body(), error.status, headers)
