"""What Prometheus scrapes: requests, tokens and times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages.ai import UsageMetadata
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)


@dataclass
class CountedRequest:
    """One request while it is answered.

    Attributes:
        model: The name under which the client asked for the model.
        begin: When it began, of ``time.perf_counter``.
        status: The status at its end; 499 if the client disconnected before.
    """

    model: str
    begin: float = field(default_factory=time.perf_counter)
    status: int = 499


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def metric(kind: Any, name: str, description: str, *labels: str, **options: Any) -> Any:
            return kind(f"sot_{name}", description, labels, registry=self._registry, **options)

        self._requests = metric(Counter, "requests", "Requests answered or refused", "model", "status")
        self._tokens = metric(Counter, "tokens", "Tokens of all model calls", "model", "kind")
        self._calls = metric(Counter, "model_calls", "Model calls made for answers", "model")
        self._running = metric(Gauge, "requests_running", "Requests being answered")
        self._seconds = metric(
            Histogram, "request_seconds", "From a request to the end of its answer", "model", buckets=_SECONDS
        )
        self._first_text = metric(
            Histogram, "first_text_seconds", "From a request to its first text", "model", buckets=_SECONDS
        )

    @contextmanager
    def request(self, model: str) -> Iterator[CountedRequest]:
        """Counts a request; the block sets its status."""
        request = CountedRequest(model)
        with self._running.track_inprogress():
            try:
                yield request
            finally:
                self._requests.labels(model, str(request.status)).inc()
                self._seconds.labels(model).observe(time.perf_counter() - request.begin)

    def note_first_text(self, request: CountedRequest) -> None:
        """Notes that the first text of ``request`` is there."""
        self._first_text.labels(request.model).observe(time.perf_counter() - request.begin)

    def note_answer(self, request: CountedRequest, usage: UsageMetadata | None, num_calls: int) -> None:
        """Notes that ``request`` is answered, and what that took."""
        request.status = 200
        self._calls.labels(request.model).inc(num_calls)
        if usage:
            self._tokens.labels(request.model, "input").inc(usage["input_tokens"])
            self._tokens.labels(request.model, "output").inc(usage["output_tokens"])

    def note_refused(self, status: int) -> None:
        """Counts a request that was refused before it reached a model."""
        self._requests.labels("", str(status)).inc()

    def text(self) -> bytes:
        """All of them in Prometheus' format."""
        return generate_latest(self._registry)
