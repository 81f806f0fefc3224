"""One served model: OpenAI's routes over its modes, and what they share with the page."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from traceback import clear_frames
from typing import Any

import prometheus_client as prometheus
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from sot_chains.serving import stream
from sot_chains.serving.answer import PREDICTED, Answer
from sot_chains.serving.chat import ChatWriter
from sot_chains.serving.modes import ServedModel
from sot_chains.serving.responses import ResponseWriter, read_responses_request
from sot_chains.serving.schema import ChatRequest, RefusedError, read_request

_log = logging.getLogger(__name__)
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)


class Metrics:
    """What Prometheus scrapes: requests, tokens and times of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        seconds = partial(prometheus.Histogram, labelnames=["model"], buckets=_SECONDS, registry=registry)
        count = partial(prometheus.Counter, registry=registry)
        self.requests = count("sot_requests", "Requests answered or refused", ["model", "status"])
        self.tokens = count("sot_tokens", "Tokens of all model calls", ["model", "kind"])
        self.calls = count("sot_model_calls", "Model calls made for answers", ["model"])
        self.running = prometheus.Gauge("sot_requests_running", "Requests being answered", registry=registry)
        self.seconds = seconds("sot_request_seconds", "From a request to the end of its answer")
        self.first_text = seconds("sot_first_text_seconds", "From a request to its first text")
        about = "Share of an answer's drafted tokens that were accepted"
        self.acceptance = seconds("sot_draft_acceptance", about, buckets=[n / 10 for n in range(1, 11)])

    @contextmanager
    def request(self, model: str, answer: Answer | None = None) -> Iterator[Callable[[], None]]:
        """Counts a request and its ``answer``; the block calls what is yielded when there is text."""
        begin, status = time.perf_counter(), 499
        with self.running.track_inprogress(), self.seconds.labels(model).time():
            try:
                yield lambda: self.first_text.labels(model).observe(time.perf_counter() - begin)
                status = 200
            except Exception as error:  # whatever a model raises is counted, and told to the client
                refused = RefusedError.from_error(error)
                status, refused.is_counted = refused.status, True
                if status >= 500:
                    _log.warning("a request for %s failed: %s", model, refused, exc_info=error)
                clear_frames(error.__traceback__)  # ends the model's streams here, not in any thread
                raise refused from error
            finally:
                self.requests.labels(model, str(status)).inc()
        if answer:
            self.calls.labels(model).inc(answer.num_calls)
            self.tokens.labels(model, "input").inc(answer.usage["input_tokens"])
            self.tokens.labels(model, "output").inc(answer.usage["output_tokens"])
            told: Mapping[str, Any] = answer.usage.get("output_token_details", {})
            accepted, rejected = (told.get(name) or 0 for name in PREDICTED)
            if drafted := accepted + rejected:
                self.acceptance.labels(model).observe(accepted / drafted)


PROBES = ("/health", "/healthz", "/ready", "/readyz", "/live", "/livez", "/ping")  # what monitors ask for


@dataclass
class Service:
    """One served model."""

    name: str  # for clients
    served: ServedModel
    with_key: Callable[[str], ServedModel] | None  # for a client's own key, if clients bring theirs
    api_key: str | None  # the server's own, which clients must send
    max_body_bytes: int
    pace: stream.Pace
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

    @property
    def routes(self) -> list[Route]:
        """OpenAI's routes, and those of monitors."""
        post = ["POST"]
        return [
            Route("/v1/chat/completions", partial(self.answer, read_request, ChatWriter), methods=post),
            Route(
                "/v1/responses", partial(self.answer, read_responses_request, ResponseWriter), methods=post
            ),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            *(Route(path, self.health) for path in PROBES),
            Route("/metrics", self.scrape),
        ]

    async def health(self, request: Request) -> Response:
        """Says that the server is up."""
        return stream.json_response({"status": "ok", "model": self.name})

    async def scrape(self, request: Request) -> Response:
        """The metrics for Prometheus."""
        metrics = prometheus.generate_latest(self.metrics.registry)
        return Response(metrics, media_type=prometheus.CONTENT_TYPE_LATEST)

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
        response = stream.error_response(error)
        response.headers.update(headers)
        return response

    async def models(self, request: Request) -> Response:
        """Lists the models."""
        return stream.json_response({"object": "list", "data": list(map(self._described, self.modes))})

    async def model(self, request: Request) -> Response:
        """Describes one model."""
        return stream.json_response(self._described(request.path_params["model"]))

    def _described(self, model: str) -> dict[str, Any]:
        head = {"id": model, "object": "model", "created": self.created, "owned_by": "sot"}
        return {**head, "description": self.served.modes[self.mode_of(model)]}

    async def answer(
        self,
        read: Callable[[bytes], ChatRequest],
        kind: type[ChatWriter | ResponseWriter],
        request: Request,
    ) -> Response:
        """Answers a conversation, whole or streamed, in the protocol of ``read`` and of the writer."""
        asked = read(await stream.read_body(request, self.max_body_bytes, self.pace))
        writer = kind(asked)
        answer = await self.served_for(request).answer(self.mode_of(asked.model), asked)

        async def write() -> None:
            with self.metrics.request(asked.model, answer):
                await answer.write()

        async def send_events(send: stream.Send) -> None:
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
                        for event in starmap(writer.annotation, answer.untold()):
                            send(event)
            if not has_begun:
                send(writer.begin())
            for event in (*starmap(writer.annotation, answer.untold()), *writer.end(answer)):
                send(event)

        if asked.stream:
            return await stream.event_response(request, send_events, self.pace, writer)
        await stream.while_connected(request, write())
        return stream.json_response(writer.whole(answer))


def bearer_key(headers: Headers) -> str:
    """The key that a request carries; ``""`` if it carries none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
