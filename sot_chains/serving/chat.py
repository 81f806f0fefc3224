"""OpenAI's routes: chat completions, responses and models, over the ways in which a model answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from langchain_core.documents import Document
from starlette.responses import Response

from sot_chains.serving.connection import EventReply, WholeReply
from sot_chains.serving.metrics import Request as Counted
from sot_chains.serving.protocol import ChatRequest, RefusedError, read_request, refused
from sot_chains.serving.replies import (
    ReplyWriter,
    WholeAnswer,
    Writer,
    annotations_of,
    finish_reason_of,
    tool_calls_of,
)
from sot_chains.serving.responses import ResponseWriter, read_responses_request
from sot_chains.serving.service import Service
from sot_chains.serving.ways import Answer, ServedModel

_log = logging.getLogger(__name__)


class ChatRoutes:
    """OpenAI's routes.

    Args:
        service: The model, and what is allowed.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._begun = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to ``app``."""
        app.add_api_route("/v1/chat/completions", self.complete, methods=["POST"], response_model=None)
        app.add_api_route("/v1/responses", self.respond, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/models/{model:path}", self.model, methods=["GET"])

    async def models(self) -> dict[str, Any]:
        """The models that can be asked for."""
        return {"object": "list", "data": [await self.model(name) for name in self._service.models]}

    async def model(self, model: str) -> dict[str, Any]:
        """One of them."""
        self._service.suffix_of(model)
        said = self._service.models[model][1]
        return {
            "id": model,
            "object": "model",
            "created": self._begun,
            "owned_by": "sot",
            "description": said,
        }

    async def complete(self, request: Request) -> Response:
        """Answers a conversation, as a whole or as a stream."""
        asked = read_request(await self._service.body(request))
        options = asked.stream_options
        writer = ReplyWriter(asked.model, include_usage=options is not None and options.include_usage)
        return await self._reply(request, asked, writer)

    async def respond(self, request: Request) -> Response:
        """The same in the newer protocol."""
        asked = read_responses_request(await self._service.body(request))
        return await self._reply(request, asked, ResponseWriter(asked.model))

    async def _reply(self, request: Request, asked: ChatRequest, writer: Writer) -> Response:
        service = self._service
        suffix = service.suffix_of(asked.model)
        messages = asked.langchain_messages()
        served = service.served_for(request)
        try:
            way = await served.way(suffix, asked, messages)
        except ValueError as error:  # what the router says of a conversation without a question
            raise refused(error) from error
        reply = _Reply(service, served, asked, Answer(way, messages), writer)
        if not asked.stream:
            return WholeReply(reply.whole)
        return EventReply(reply.events(), service.pace, writer.text)


class _Reply:
    """The reply to one request.

    Args:
        service: Who is asked.
        served: The model that answers.
        asked: The request.
        answer: Its answer.
        writer: Writes it for the client.
    """

    def __init__(
        self, service: Service, served: ServedModel, asked: ChatRequest, answer: Answer, writer: Writer
    ) -> None:
        self._metrics = service.metrics
        self._served = served
        self._asked = asked
        self._answer = answer
        self._writer = writer

    async def whole(self) -> dict[str, Any]:
        """The reply in one piece.

        Raises:
            RefusedError: There is no answer.
        """
        answer = self._answer
        with self._metrics.request(self._asked.model) as counted:
            try:
                await answer.write()
            except Exception as error:  # whatever a model raises is the client's answer
                raise _noted(error, counted) from error
            self._note_end(counted)
        return self._writer.whole(await self._whole_answer())

    async def events(self) -> AsyncGenerator[bytes | str, None]:
        """The reply as server-sent events; what is text is still to be encoded.

        Raises:
            RefusedError: There is no answer, and nothing has been sent.
        """
        answer, writer, has_begun = self._answer, self._writer, False
        with self._metrics.request(self._asked.model) as counted:
            try:
                async with aclosing(answer.read()) as pieces:
                    async for text, calls in pieces:
                        if not has_begun:
                            self._metrics.note_text(counted)
                            has_begun = True
                            yield writer.begin(text)
                        elif text:
                            yield text
                        if calls:
                            yield writer.calls(calls)
            except Exception as error:  # as above
                known = _noted(error, counted)
                if not has_begun:
                    raise known from error
                yield writer.failed(known)
                return
            self._note_end(counted)
        if not has_begun:
            yield writer.begin("")
        for event in writer.end(await self._whole_answer()):
            yield event

    async def _whole_answer(self) -> WholeAnswer:
        answer = self._answer
        calls = tool_calls_of(answer.message) if answer.calls_tools and answer.message else []
        return WholeAnswer(
            answer.text,
            calls,
            await self._annotations(),
            self._finish_reason,
            answer.usage,
            self._particulars,
        )

    @property
    def _finish_reason(self) -> str:
        answer = self._answer
        if answer.is_out_of_tokens:
            return "length"
        return finish_reason_of(answer.metadata, calls_tools=answer.calls_tools)

    @property
    def _particulars(self) -> dict[str, Any]:
        """What is not OpenAI's: how the answer came about."""
        trace = self._answer.metadata.get("sot")
        if trace is None:
            return {}
        names = ("route", "skeleton", "is_complete", "failures", "seconds", "num_calls")
        return {"sot": {name: trace[name] for name in names} | {"route_reason": self._answer.reason}}

    def _note_end(self, counted: Counted) -> None:
        counted.status = 200
        trace = self._answer.metadata.get("sot")
        self._metrics.note_answer(counted, self._answer.usage, trace["num_calls"] if trace else 1)

    async def _annotations(self) -> list[dict[str, Any]]:
        """The citations of the answer: of the folder's documents, and of the references in the request."""
        found = list(self._answer.metadata.get("citations") or [])
        if self._asked.references and (copying := self._served.copying):
            documents = [
                Document(one.text, metadata={k: v for k, v in (("title", one.title), ("url", one.url)) if v})
                for one in self._asked.references
            ]
            # On a thread: a long answer and long references take a while.
            found += await asyncio.to_thread(copying.cite, self._answer.text, documents)
        return annotations_of(found)


def _noted(error: Exception, counted: Counted) -> RefusedError:
    known = refused(error)
    counted.status, known.is_counted = known.status, True
    if known.status >= 500:
        _log.warning("a request for %s failed: %s", counted.model, known, exc_info=error)
    return known
