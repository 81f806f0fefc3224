"""``create_app``: the server as an ASGI application. The other modules do the work."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from langchain_core.runnables import Runnable
from starlette.exceptions import HTTPException
from starlette.responses import Response

from sot_chains.calls.usage import Price
from sot_chains.providers import Provider, close_clients
from sot_chains.serving.chat import ChatRoutes
from sot_chains.serving.connection import ClientGoneError, Guard, Pace, error_response
from sot_chains.serving.loading import Copying
from sot_chains.serving.page import OPEN_PATHS, PageRoutes
from sot_chains.serving.protocol import RefusedError
from sot_chains.serving.service import Service
from sot_chains.serving.ways import ServedModel

_MAX_BODY_BYTES = 8_000_000


def create_app(
    model: str | Runnable[Any, Any] | Provider,
    *,
    name: str | None = None,
    copying: Copying | None = None,
    model_of_key: Callable[[str], str | Runnable[Any, Any] | Provider] | None = None,
    api_key: str | None = None,
    prices: Mapping[str, Price] | Price | None = None,
    host: str = "127.0.0.1",
    max_body_bytes: int = _MAX_BODY_BYTES,
    patience_seconds: float = 60.0,
    in_turn: bool = False,
) -> FastAPI:
    """The server for one model.

    Args:
        model: What :class:`~sot_chains.SkeletonOfThought` takes.
        name: The model's name for clients; by default its own. Beside ``NAME`` there are ``NAME:sot`` and
            ``NAME:auto``, and ``NAME:copy`` with a folder.
        copying: References and citations, if the package for them is installed.
        model_of_key: Makes the model for the key that a client sends, where the server has none.
        api_key: The key that clients must send; ``None`` for none.
        prices: What the model costs, for the page.
        host: Where the server will be bound: on loopback only names of this machine are answered.
        max_body_bytes: The longest body of a request.
        patience_seconds: How long a client may take to read what is sent to it.
        in_turn: Whether the page asks the ways one after the other, which it should where they share a
            processor.

    Raises:
        ValueError: The model's name is not supported.
        TypeError: ``model`` is no model.
    """

    def serving(one: str | Runnable[Any, Any] | Provider) -> ServedModel:
        return ServedModel(one, copying=copying, prices=prices)

    def serving_for(key: str) -> ServedModel:
        assert model_of_key
        return serving(model_of_key(key))

    served = serving(model)
    service = Service(
        name=name or served.provider.model_name,
        served=served,
        of_key=serving_for if model_of_key else None,
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        pace=Pace(patience_seconds),
        in_turn=in_turn,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await close_clients()

    # FastAPI's pages of documentation load scripts from another host.
    app = FastAPI(title="Skeleton-of-Thought", docs_url=None, redoc_url=None, lifespan=lifespan)
    ChatRoutes(service).add_to(app)
    PageRoutes(service).add_to(app)

    async def health() -> dict[str, str]:
        return {"status": "ok", "model": service.name}

    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)
        if not error.is_counted:
            service.metrics.note_refused(error.status)
        return error_response(error)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return error_response(RefusedError(said, status=error.status_code))

    async def broken(request: Request, error: Exception) -> Response:
        return error_response(RefusedError(f"the server failed: {type(error).__name__}", status=500))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"], response_model=None)
    app.add_exception_handler(RefusedError, refused)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, broken)
    app.add_middleware(Guard, api_key=api_key, host=host, open_paths=OPEN_PATHS)
    return app
