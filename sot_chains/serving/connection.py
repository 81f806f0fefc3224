"""One connection: work that ends with its reader, bounded bodies, and who may ask. Knows ASGI, not models."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sot_chains.aio.tasks import cancel_and_wait
from sot_chains.serving.protocol import RefusedError

T = TypeVar("T")

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_FLUSH_SECONDS = 0.02  # pieces that come within it are sent together: one packet for a token costs more
_MOST_SENT_PER_SECOND = 1000  # to all readers together: some tenth of a core
_DRAIN_SECONDS = 3.0


class ClientGoneError(Exception):
    """The client has closed the connection, or does not read."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work``, which is cancelled once the client is gone; its body must have been read.

    Raises:
        ClientGoneError: It is gone. Nothing of ``work`` is left running.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        await cancel_and_wait([working, leaving])


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Answered(Response):
    """A reply that is written while the client is connected, and no longer.

    Its status and its headers follow from what is written.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it, or what it is refused with."""

        async def write() -> None:
            try:
                await self.write(send)
            except RefusedError as error:  # nothing has been sent
                await error_response(error)(scope, receive, send)

        with contextlib.suppress(ClientGoneError):
            await while_connected(receive, write())

    async def write(self, send: Send) -> None:
        """Writes and sends it.

        Raises:
            RefusedError: There is no answer, and nothing has been sent.
            ClientGoneError: The client does not read.
        """
        raise NotImplementedError  # subclasses write; a Response is no abstract class


class WholeReply(Answered):
    """JSON.

    Args:
        content: Makes it.
    """

    def __init__(self, content: Callable[[], Awaitable[Any]]) -> None:
        super().__init__()
        self._content = content

    async def write(self, send: Send) -> None:
        """See the base class."""
        body = json_response(await self._content())
        await send({"type": "http.response.start", "status": 200, "headers": body.raw_headers})
        await send({"type": "http.response.body", "body": body.body})


@dataclass
class Pace:
    """How often readers are sent what is written for them, and how long they may take.

    Attributes:
        patience_seconds: How long a reader may take for what is sent to it.
        num_readers: How many streams are being read.
    """

    patience_seconds: float = 60.0
    num_readers: int = 0

    @property
    def seconds(self) -> float:
        """The time from one packet to the next of one stream. More readers get fewer and larger ones."""
        return max(_FLUSH_SECONDS, self.num_readers / _MOST_SENT_PER_SECOND)

    @contextlib.contextmanager
    def reader(self) -> Iterator[None]:
        """Counts a reader."""
        self.num_readers += 1
        try:
            yield
        finally:
            self.num_readers -= 1


class EventReply(Answered):
    """Server-sent events.

    Args:
        events: What is sent: bytes, or pieces of a text.
        pace: Shared by all replies of a server.
        encode: Makes an event of a piece of a text.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes | str, None],
        pace: Pace,
        encode: Callable[[str], bytes] = str.encode,
    ) -> None:
        super().__init__()
        self._events = events
        self._pace = pace
        self._encode = encode

    async def write(self, send: Send) -> None:
        """See the base class.

        A piece is sent at once, in the task that has read it, if the last one was sent long enough ago.
        Otherwise it waits for the next one, or for a second task if none comes.
        """
        loop, waiting, sending = asyncio.get_running_loop(), list[bytes | str](), asyncio.Lock()
        pace, sent_at = self._pace, 0.0

        async def flush() -> None:
            nonlocal sent_at
            async with sending:
                body = self._joined(waiting)
                waiting.clear()
                sent_at = loop.time()
                await self._send(send, body, more_body=True)

        async def flush_late() -> None:
            while True:
                await has_late.wait()
                has_late.clear()
                await asyncio.sleep(pace.seconds)
                if waiting:
                    await flush()

        async with aclosing(self._events) as events:
            async for first in events:
                waiting.append(first)
                break
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
            await flush()
            has_late, late = asyncio.Event(), asyncio.create_task(flush_late())
            try:
                with pace.reader():
                    async for event in events:
                        waiting.append(event)
                        if loop.time() - sent_at >= pace.seconds:
                            await flush()
                        else:
                            has_late.set()
                        if late.done():
                            late.result()
                async with sending:  # cancelled while it sends, it would lose what it has taken
                    late.cancel()
            finally:
                await cancel_and_wait([late])
        # With the end of the body: a client may hang up once it has read the last event.
        await self._send(send, self._joined(waiting), more_body=False)

    def _joined(self, events: list[bytes | str]) -> bytes:
        """The events in one piece; neighbouring pieces of text become one event."""
        return b"".join(
            self._encode("".join(cast("Iterable[str]", group)))
            if kind is str
            else b"".join(cast("Iterable[bytes]", group))
            for kind, group in groupby(events, type)
        )

    async def _send(self, send: Send, body: bytes, *, more_body: bool) -> None:
        try:
            async with asyncio.timeout(self._pace.patience_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": more_body})
        except (TimeoutError, OSError) as error:
            raise ClientGoneError from error


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A reply in JSON, in ASCII: a model's text may hold half of an emoji, which UTF-8 does not take."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


def error_response(error: RefusedError) -> Response:
    """The reply to a request that is not answered."""
    headers = {}
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(round(error.retry_after_seconds + 0.5))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error.body(), error.status, headers)


async def body_of(receive: Receive, headers: Headers, *, max_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        RefusedError: It is longer than ``max_bytes``.
        ClientGoneError: The client is gone.
    """
    declared = headers.get("content-length", "0")
    is_too_long = not declared.isdigit() or int(declared) > max_bytes
    parts, num_bytes, deadline = [], 0, time.monotonic() + _DRAIN_SECONDS
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            is_too_long = True
        # A client that is still sending does not read: what is too long is read on for a while, and dropped.
        if not is_too_long:
            parts.append(part)
        elif parts:
            parts.clear()
        if not message.get("more_body") or (is_too_long and time.monotonic() > deadline):
            break
    if is_too_long:
        raise RefusedError(f"the body is longer than the {max_bytes} bytes that are read here", status=413)
    return b"".join(parts)


class Guard:
    """Admits requests: those with the key, to this server's own name, and not from another site's page.

    The page asks without a key for what it is made of, and a run's name is as hard to guess as a key.

    Args:
        app: What is guarded.
        api_key: The key that requests must carry; ``None`` for none.
        host: Where the server is bound.
        open_paths: Paths that need no key.
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, host: str, open_paths: frozenset[str] = frozenset()
    ) -> None:
        self._app = app
        self._key = api_key.encode() if api_key else None
        self._open_paths = open_paths
        # A name that resolves to this machine may belong to another site (DNS rebinding).
        self._names = {host, "localhost"} if is_loopback(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on a request, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope, Headers(scope=scope))
        except RefusedError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, _with_security(send))

    def _check(self, scope: Mapping[str, Any], headers: Headers) -> None:
        name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        if self._names is not None and name not in self._names and not is_loopback(name):
            raise RefusedError(f"this server is not {name!r}", status=403)
        origin = headers.get("origin")
        if origin and urlsplit(origin).netloc != headers.get("host"):
            raise RefusedError(f"pages of {origin} may not ask here", status=403)
        if self._key is None or scope["path"] in self._open_paths or scope["path"].startswith("/runs/"):
            return
        if not hmac.compare_digest(key_of(headers).encode("latin-1"), self._key):  # the bytes that were sent
            raise RefusedError(
                "the API key is missing or wrong: send the server's --api-key as a bearer token",
                status=401,
                code="invalid_api_key",
            )


def key_of(headers: Headers) -> str:
    """The key that a request carries; ``""`` if it carries none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def is_loopback(name: str) -> bool:
    """Whether ``name`` is this machine's for itself."""
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost"


# Nothing from another host, no script or style within a page, and no text made into HTML by a script.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_SECURITY = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


def _with_security(send: Send) -> Send:
    async def secured(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *_SECURITY]}
        await send(message)

    return secured
