"""What Prometheus scrapes of one server."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from langchain_core.messages.ai import UsageMetadata
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sot_chains.serving.schema import RefusedError

_log = logging.getLogger(__name__)
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)


class Metrics:
    """What Prometheus scrapes: requests, tokens and times of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        seconds = partial(Histogram, labelnames=["model"], buckets=_SECONDS, registry=registry)
        count = partial(Counter, registry=registry)
        self.requests = count("sot_requests", "Requests answered or refused", ["model", "status"])
        self.tokens = count("sot_tokens", "Tokens of all model calls", ["model", "kind"])
        self.calls = count("sot_model_calls", "Model calls made for answers", ["model"])
        self.running = Gauge("sot_requests_running", "Requests being answered", registry=registry)
        self.seconds = seconds("sot_request_seconds", "From a request to the end of its answer")
        self.first_text = seconds("sot_first_text_seconds", "From a request to its first text")

    @contextmanager
    def request(self, model: str) -> Iterator[CountedRequest]:
        """Counts a request; whatever a model raises is what its client is told."""
        counted = CountedRequest(self, model)
        with self.running.track_inprogress(), self.seconds.labels(model).time():
            try:
                yield counted
            except Exception as error:
                refused = RefusedError.from_error(error)
                counted.status, refused.is_counted = refused.status, True
                if refused.status >= 500:
                    _log.warning("a request for %s failed: %s", model, refused, exc_info=error)
                raise refused from error
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

    def note_answer(self, usage: UsageMetadata, num_calls: int) -> None:
        """Notes that it is answered, and what that took."""
        self.status = 200
        self.metrics.calls.labels(self.model).inc(num_calls)
        self.metrics.tokens.labels(self.model, "input").inc(usage["input_tokens"])
        self.metrics.tokens.labels(self.model, "output").inc(usage["output_tokens"])
