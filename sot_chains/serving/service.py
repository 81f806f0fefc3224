"""One served model: OpenAI's routes over its modes, and what they share with the page."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.responses import Response

from sot_chains.serving.answer import Answer
from sot_chains.serving.chat import ChatWriter
from sot_chains.serving.metrics import CountedRequest, Metrics
from sot_chains.serving.modes import ServedModel
from sot_chains.serving.responses import ResponseWriter, read_responses_request
from sot_chains.serving.schema import ChatRequest, RefusedError, read_request
from sot_chains.serving.stream import Pace, Send, event_response, json_response, read_body, while_connected

_log = logging.getLogger(__name__)


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

    def add_to(self, app: FastAPI) -> None:
        """Adds OpenAI's routes to ``app``."""
        app.add_api_route("/v1/chat/completions", self.complete, methods=["POST"], response_model=None)
        app.add_api_route("/v1/responses", self.respond, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/models/{model:path}", self.model, methods=["GET"])

    async def models(self) -> dict[str, Any]:
        """Lists the models."""
        return {"object": "list", "data": [await self.model(name) for name in self.modes]}

    async def model(self, model: str) -> dict[str, Any]:
        """Describes one model."""
        description = self.served.modes[self.mode_of(model)]
        head = {"id": model, "object": "model", "created": self.created, "owned_by": "sot"}
        return {**head, "description": description}

    async def complete(self, request: Request) -> Response:
        """Answers a conversation, whole or streamed."""
        asked = read_request(await self.body(request))
        options = asked.stream_options
        writer = ChatWriter(asked.model, include_usage=options is not None and options.include_usage)
        return await self._reply(request, asked, writer)

    async def respond(self, request: Request) -> Response:
        """The same in the responses protocol."""
        asked = read_responses_request(await self.body(request))
        return await self._reply(request, asked, ResponseWriter(asked.model))

    async def _reply(
        self, request: Request, asked: ChatRequest, writer: ChatWriter | ResponseWriter
    ) -> Response:
        suffix = self.mode_of(asked.model)
        answer = await self.served_for(request).answer(suffix, asked)
        if asked.stream:
            write = partial(self._stream, asked.model, answer, writer)
            return await event_response(request, write, self.pace, writer.text)
        await while_connected(request, self._write(asked.model, answer))
        return json_response(writer.whole(answer))

    async def _write(self, model: str, answer: Answer) -> None:
        with self.metrics.request(model) as counted:
            try:
                await answer.write()
            except Exception as error:  # whatever a model raises is the client's answer
                raise _noted(error, counted) from error
            counted.note_answer(answer.usage, answer.num_calls)

    async def _stream(
        self, model: str, answer: Answer, writer: ChatWriter | ResponseWriter, send: Send
    ) -> None:
        has_begun = False
        with self.metrics.request(model) as counted:
            try:
                async with aclosing(answer.stream()) as pieces:
                    async for text, calls in pieces:
                        if not has_begun:
                            counted.note_first_text()
                            has_begun = True
                            send(writer.begin(text))
                        elif text:
                            send(text)
                        if calls:
                            send(writer.calls(calls))
            except Exception as error:  # as above
                refused = _noted(error, counted)
                if not has_begun:
                    raise refused from error
                send(writer.failed(refused))
                return
            counted.note_answer(answer.usage, answer.num_calls)
        if not has_begun:
            send(writer.begin(""))
        for event in writer.end(answer):
            send(event)


def _noted(error: Exception, counted: CountedRequest) -> RefusedError:
    refused = RefusedError.from_error(error)
    counted.status, refused.is_counted = refused.status, True
    if refused.status >= 500:
        _log.warning("a request for %s failed: %s", counted.model, refused, exc_info=error)
    return refused


def bearer_key(headers: Headers) -> str:
    """The key that a request carries; ``""`` if it carries none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
