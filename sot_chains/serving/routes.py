"""OpenAI's routes: chat completions, responses and models, over the modes in which a model answers."""

from __future__ import annotations

import logging
import time
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from sot_chains.serving.answer import Answer
from sot_chains.serving.chat import ChatWriter
from sot_chains.serving.responses import ResponseWriter, read_responses_request
from sot_chains.serving.schema import ChatRequest, RefusedError, read_request
from sot_chains.serving.service import CountedRequest, Service
from sot_chains.serving.stream import Send, event_response, json_response, while_connected

_log = logging.getLogger(__name__)


class OpenAIRoutes:
    """OpenAI's routes for one served model."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to ``app``."""
        app.add_api_route("/v1/chat/completions", self.complete, methods=["POST"], response_model=None)
        app.add_api_route("/v1/responses", self.respond, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/models/{model:path}", self.model, methods=["GET"])

    async def models(self) -> dict[str, Any]:
        """Lists the models."""
        return {"object": "list", "data": [await self.model(name) for name in self._service.models]}

    async def model(self, model: str) -> dict[str, Any]:
        """Describes one model."""
        description = self._service.served.modes[self._service.mode_of(model)]
        head = {"id": model, "object": "model", "created": self._created, "owned_by": "sot"}
        return {**head, "description": description}

    async def complete(self, request: Request) -> Response:
        """Answers a conversation, whole or streamed."""
        asked = read_request(await self._service.body(request))
        options = asked.stream_options
        writer = ChatWriter(asked.model, include_usage=options is not None and options.include_usage)
        return await self._reply(request, asked, writer)

    async def respond(self, request: Request) -> Response:
        """The same in the responses protocol."""
        asked = read_responses_request(await self._service.body(request))
        return await self._reply(request, asked, ResponseWriter(asked.model))

    async def _reply(
        self, request: Request, asked: ChatRequest, writer: ChatWriter | ResponseWriter
    ) -> Response:
        suffix = self._service.mode_of(asked.model)
        answer = await self._service.served_for(request).answer(suffix, asked)
        if asked.stream:
            write = partial(self._stream, asked.model, answer, writer)
            return await event_response(request, write, self._service.pace, writer.text)
        await while_connected(request, self._write(asked.model, answer))
        return json_response(writer.whole(answer))

    async def _write(self, model: str, answer: Answer) -> None:
        with self._service.metrics.request(model) as counted:
            try:
                await answer.write()
            except Exception as error:  # whatever a model raises is the client's answer
                raise _noted(error, counted) from error
            counted.note_answer(answer.usage, answer.num_calls)

    async def _stream(
        self, model: str, answer: Answer, writer: ChatWriter | ResponseWriter, send: Send
    ) -> None:
        has_begun = False
        with self._service.metrics.request(model) as counted:
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
