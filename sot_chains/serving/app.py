"""``create_app``: the server as an ASGI application, and who may use it."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Any, Literal
from urllib.parse import urlsplit

from langchain_core.runnables import Runnable
from sse_starlette.sse import AppStatus
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sot_chains.calls.usage import Price
from sot_chains.prompts.profile import ModelProfile
from sot_chains.providers import Provider, close_clients
from sot_chains.serving.loading import Copying
from sot_chains.serving.modes import ServedModel
from sot_chains.serving.page import OPEN_PATHS, PageRoutes
from sot_chains.serving.schema import RefusedError
from sot_chains.serving.service import Service, bearer_key
from sot_chains.serving.stream import Pace, error_response

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
        pace=Pace(client_timeout_seconds),
        in_turn=in_turn,
    )
    errors = (RefusedError, HTTPException, ClientDisconnect, Exception)
    return Starlette(
        routes=[*service.routes, *PageRoutes(service).routes],
        middleware=[
            # Outside of the guard: what a browser asks before a request carries no key.
            *([Middleware(CORSMiddleware, allow_origins=allow, **_CORS)] if allow else []),
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


_CORS: dict[str, Any] = {
    "allow_methods": ["GET", "POST"],
    "allow_headers": ["*"],
    "allow_private_network": True,  # a page on the web may ask a server on its reader's machine
}
# Nothing from another host, no script or style within a page, and no text made into HTML by a script.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self' blob:; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_SECURITY = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


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
            await error_response(error)(scope, receive, send)
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
