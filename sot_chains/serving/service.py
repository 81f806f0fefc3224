"""One served model: OpenAI's routes over its modes, and what they share with the page."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from sot_chains.serving.chat import ChatWriter
from sot_chains.serving.metrics import Metrics
from sot_chains.serving.modes import ServedModel
from sot_chains.serving.responses import ResponseWriter, read_responses_request
from sot_chains.serving.schema import ChatRequest, RefusedError, read_request
from sot_chains.serving.stream import (
    Pace,
    Send,
    error_response,
    event_response,
    json_response,
    read_body,
    while_connected,
)

PROBES = ("/health", "/healthz", "/ready", "/readyz", "/live", "/livez", "/ping")  # what monitors ask for


@dataclass
class Service:
    """One served model."""

    name: str  # for clients
    served: ServedModel
    with_key: Callable[[str], ServedModel] | None  # for a client's own key, if clients bring theirs
    api_key: str | None  # the server's own, which clients must send
    max_body_bytes: int
    pace: Pace
    in_turn: bool  # whether the page uses one mode after the other
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def modes(self) -> dict[str, str]:
        """The mode by the name of the model that clients ask for."""
        return {f"{self.name}:{mode}" if mode else self.name: mode for mode in self.served.modes}

    def mode_of(self, model: str) -> str:
        """The mode that a client asks for; a ``RefusedError`` if there is no such model."""
        if model not in self.modes:
            message = f"the model {model[:200]!r} does not exist; available are {', '.join(self.modes)}"
            raise RefusedError(message, status=404, param="model", code="model_not_found")
        return self.modes[model]

    def served_for(self, request: Request) -> ServedModel:
        """The model, with the client's own key if the server has none."""
        if self.with_key is None:
            return self.served
        if not (key := bearer_key(request.headers)):
            message = "the API key is missing; this server passes each client's own key on"
            raise RefusedError(message, status=401, code="invalid_api_key")
        return self.with_key(key)

    async def body(self, request: Request) -> bytes:
        """The body of ``request``."""
        return await read_body(request, self.max_body_bytes, self.pace.timeout_seconds)

    @property
    def routes(self) -> list[Route]:
        """OpenAI's routes, and those of monitors."""
        return [
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            *(Route(path, self.health) for path in PROBES),
            Route("/metrics", self.scrape),
        ]

    async def health(self, request: Request) -> Response:
        """Says that the server is up."""
        return json_response({"status": "ok", "model": self.name})

    async def scrape(self, request: Request) -> Response:
        """The metrics for Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def refuse(self, request: Request, error: Any) -> Response:
        """The reply to a request that is not answered, for whatever reason."""
        headers = getattr(error, "headers", None) or {}  # the methods that are allowed
        if isinstance(error, HTTPException):
            message = f"{request.method} {request.url.path[:200]}: {error.detail}"
            error = RefusedError(message, error.status_code)
        elif not isinstance(error, RefusedError):
            is_gone = isinstance(error, ClientDisconnect)  # then nobody reads this
            error = RefusedError(f"internal error: {type(error).__name__}", 499 if is_gone else 500)
            error.is_counted = is_gone
        if not error.is_counted:
            self.metrics.requests.labels("", str(error.status)).inc()
        response = error_response(error)
        response.headers.update(headers)
        return response

    async def models(self, request: Request) -> Response:
        """Lists the models."""
        return json_response({"object": "list", "data": list(map(self._described, self.modes))})

    async def model(self, request: Request) -> Response:
        """Describes one model."""
        return json_response(self._described(request.path_params["model"]))

    def _described(self, model: str) -> dict[str, Any]:
        description = self.served.modes[self.mode_of(model)]
        head = {"id": model, "object": "model", "created": self.created, "owned_by": "sot"}
        return {**head, "description": description}

    async def complete(self, request: Request) -> Response:
        """Answers a conversation, whole or streamed."""
        asked = read_request(await self.body(request))
        return await self._reply(request, asked, ChatWriter(asked))

    async def respond(self, request: Request) -> Response:
        """The same in the responses protocol."""
        asked = read_responses_request(await self.body(request))
        return await self._reply(request, asked, ResponseWriter(asked))

    async def _reply(
        self, request: Request, asked: ChatRequest, writer: ChatWriter | ResponseWriter
    ) -> Response:
        answer = await self.served_for(request).answer(self.mode_of(asked.model), asked)

        async def write() -> None:
            with self.metrics.request(asked.model, answer):
                await answer.write()

        async def stream(send: Send) -> None:
            has_begun = False
            with self.metrics.request(asked.model, answer) as note_text:
                async with aclosing(answer.stream()) as pieces:
                    async for text, calls in pieces:
                        if not has_begun:
                            note_text()
                            send(writer.begin())
                            has_begun = True
                        if text:
                            send(text)
                        for call, arguments in calls:
                            send(writer.arguments(call, arguments))
            if not has_begun:
                send(writer.begin())
            for event in writer.end(answer):
                send(event)

        if asked.stream:
            return await event_response(request, stream, self.pace, writer)
        await while_connected(request, write())
        return json_response(writer.whole(answer))


def bearer_key(headers: Headers) -> str:
    """The key that a request carries; ``""`` if it carries none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
