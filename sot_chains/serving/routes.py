"""OpenAI's routes: chat completions, responses and models, over the modes in which a model answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from langchain_core.documents import Document
from starlette.responses import Response

from sot_chains.serving.chat import (
    ChatWriter,
    FinishedAnswer,
    Writer,
    find_finish_reason,
    make_annotations,
    make_tool_calls,
)
from sot_chains.serving.metrics import CountedRequest, Metrics
from sot_chains.serving.modes import Answer, ServedModel
from sot_chains.serving.responses import ResponseWriter, read_responses_request
from sot_chains.serving.schema import ChatRequest, RefusedError, read_request
from sot_chains.serving.service import Service
from sot_chains.serving.stream import event_response, json_response, while_connected

_log = logging.getLogger(__name__)
_TRACE_FIELDS = ("route", "skeleton", "is_complete", "failures", "seconds", "num_calls")


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
        self._service.mode_of(model)
        return {
            "id": model,
            "object": "model",
            "created": self._created,
            "owned_by": "sot",
            "description": self._service.models[model][1],
        }

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

    async def _reply(self, request: Request, asked: ChatRequest, writer: Writer) -> Response:
        service = self._service
        suffix = service.mode_of(asked.model)
        messages = asked.langchain_messages()
        served = service.served_for(request)
        try:
            mode = await served.mode(suffix, asked, messages)
        except ValueError as error:  # what the router says of a conversation without a question
            raise RefusedError.from_error(error) from error
        reply = _Reply(service.metrics, served, asked, Answer(mode, messages), writer)
        if asked.stream:
            return await event_response(request, reply.events(), service.pace, writer.text)
        return json_response(await while_connected(request, reply.whole()))


@dataclass
class _Reply:
    """The reply to one request: ``answer`` of ``served``, written by ``writer``."""

    metrics: Metrics
    served: ServedModel
    asked: ChatRequest
    answer: Answer
    writer: Writer

    async def whole(self) -> dict[str, Any]:
        """The reply in one piece.

        Raises:
            RefusedError: There is no answer.
        """
        with self.metrics.request(self.asked.model) as counted:
            try:
                await self.answer.write()
            except Exception as error:  # whatever a model raises is the client's answer
                raise _noted(error, counted) from error
            self._note_end(counted)
        return self.writer.whole(await self._finished())

    async def events(self) -> AsyncGenerator[bytes | str, None]:
        """The reply as server-sent events, and pieces of text that are still to be encoded.

        Raises:
            RefusedError: There is no answer, and nothing has been sent.
        """
        writer, has_begun = self.writer, False
        with self.metrics.request(self.asked.model) as counted:
            try:
                async with aclosing(self.answer.stream()) as pieces:
                    async for text, calls in pieces:
                        if not has_begun:
                            self.metrics.note_first_text(counted)
                            has_begun = True
                            yield writer.begin(text)
                        elif text:
                            yield text
                        if calls:
                            yield writer.calls(calls)
            except Exception as error:  # as above
                refused = _noted(error, counted)
                if not has_begun:
                    raise refused from error
                yield writer.failed(refused)
                return
            self._note_end(counted)
        if not has_begun:
            yield writer.begin("")
        for event in writer.end(await self._finished()):
            yield event

    def _note_end(self, counted: CountedRequest) -> None:
        trace = self.answer.metadata.get("sot")
        self.metrics.note_answer(counted, self.answer.usage, trace["num_calls"] if trace else 1)

    async def _finished(self) -> FinishedAnswer:
        answer = self.answer
        fields = {}
        if trace := answer.metadata.get("sot"):
            fields["sot"] = {**{name: trace[name] for name in _TRACE_FIELDS}, "route_reason": answer.reason}
        reason = find_finish_reason(answer.metadata, calls_tools=answer.calls_tools)
        return FinishedAnswer(
            text=answer.text,
            calls=make_tool_calls(answer.message) if answer.message else [],
            annotations=await self._annotations(),
            finish_reason="length" if answer.is_out_of_tokens else reason,
            usage=answer.usage,
            fields=fields,
        )

    async def _annotations(self) -> list[dict[str, Any]]:
        """The citations of the folder's documents and of the request's references."""
        citations = list(self.answer.metadata.get("citations") or [])
        if self.asked.references and (copying := self.served.copying):
            documents = [
                Document(one.text, metadata=one.model_dump(exclude={"text"}, exclude_none=True))
                for one in self.asked.references
            ]
            # On a thread: a long answer and long references take a while.
            citations += await asyncio.to_thread(copying.cite, self.answer.text, documents)
        return make_annotations(citations)


def _noted(error: Exception, counted: CountedRequest) -> RefusedError:
    refused = RefusedError.from_error(error)
    counted.status, refused.is_counted = refused.status, True
    if refused.status >= 500:
        _log.warning("a request for %s failed: %s", counted.model, refused, exc_info=error)
    return refused
