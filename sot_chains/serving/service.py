"""What all routes of one server share: the model, by key where clients bring theirs, limits and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from langchain_core.messages.ai import UsageMetadata
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers

from sot_chains.serving.modes import ServedModel
from sot_chains.serving.schema import RefusedError
from sot_chains.serving.stream import Pace, read_body

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)


class Metrics:
    """What Prometheus scrapes: requests, tokens and times of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def metric(kind: Any, name: str, description: str, *labels: str, **options: Any) -> Any:
            return kind(f"sot_{name}", description, labels, registry=self._registry, **options)

        def seconds(name: str, description: str) -> Any:
            return metric(Histogram, f"{name}_seconds", description, "model", buckets=_SECONDS)

        self.requests = metric(Counter, "requests", "Requests answered or refused", "model", "status")
        self.tokens = metric(Counter, "tokens", "Tokens of all model calls", "model", "kind")
        self.calls = metric(Counter, "model_calls", "Model calls made for answers", "model")
        self.running = metric(Gauge, "requests_running", "Requests being answered")
        self.seconds = seconds("request", "From a request to the end of its answer")
        self.first_text = seconds("first_text", "From a request to its first text")

    @contextmanager
    def request(self, model: str) -> Iterator[CountedRequest]:
        """Counts a request; the block sets its status."""
        counted = CountedRequest(self, model)
        with self.running.track_inprogress(), self.seconds.labels(model).time():
            try:
                yield counted
            finally:
                self.requests.labels(model, str(counted.status)).inc()

    def text(self) -> bytes:
        """All of them in Prometheus' format."""
        return generate_latest(self._registry)


@dataclass
class CountedRequest:
    """One request while it is answered; its status is 499 if the client disconnects before the end."""

    metrics: Metrics
    model: str
    begin: float = field(default_factory=time.perf_counter)
    status: int = 499

    def note_first_text(self) -> None:
        """Notes that there is text."""
        self.metrics.first_text.labels(self.model).observe(time.perf_counter() - self.begin)

    def note_answer(self, usage: UsageMetadata | None, num_calls: int) -> None:
        """Notes that it is answered, and what that took."""
        self.status = 200
        self.metrics.calls.labels(self.model).inc(num_calls)
        if usage:
            self.metrics.tokens.labels(self.model, "input").inc(usage["input_tokens"])
            self.metrics.tokens.labels(self.model, "output").inc(usage["output_tokens"])


@dataclass
class Service:
    """One served model.

    Attributes:
        name: Its name for clients.
        served: The model.
        with_key: Makes the model for a client's key; ``None`` if clients need none of their own.
        api_key: The server's own key, which clients must send.
        max_body_bytes: The longest body of a request.
        pace: The pace of streams.
        in_turn: Whether the page uses one mode after the other.
        metrics: Counts its requests.
    """

    name: str
    served: ServedModel
    with_key: Callable[[str], ServedModel] | None
    api_key: str | None
    max_body_bytes: int
    pace: Pace
    in_turn: bool
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def models(self) -> dict[str, str]:
        """The mode by the name of the model that clients ask for."""
        return {f"{self.name}:{mode}" if mode else self.name: mode for mode in self.served.modes}

    def mode_of(self, model: str) -> str:
        """The mode that a client asks for; a ``RefusedError`` if there is no such model."""
        if model not in self.models:
            message = f"the model {model[:200]!r} does not exist; available are {', '.join(self.models)}"
            raise RefusedError(message, status=404, param="model", code="model_not_found")
        return self.models[model]

    def served_for(self, request: Request) -> ServedModel:
        """The model, with the client's own key if the server has none."""
        if self.with_key is None:
            return self.served
        if not (key := bearer_key(request.headers)):
            message = "the API key is missing; this server passes each client's own key on"
            raise RefusedError(message, status=401, code="invalid_api_key")
        return self.with_key(key)

    async def body(self, request: Request) -> bytes:
        """The body of ``request``; see :func:`~sot_chains.serving.stream.read_body`."""
        timeout = self.pace.timeout_seconds
        return await read_body(request, max_bytes=self.max_body_bytes, timeout_seconds=timeout)


def bearer_key(headers: Headers) -> str:
    """The key that a request carries; ``""`` if it carries none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
