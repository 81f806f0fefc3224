"""What Prometheus scrapes of one server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from traceback import clear_frames

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sot_chains.serving.answer import Answer
from sot_chains.serving.schema import RefusedError

_log = logging.getLogger(__name__)
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)


class Metrics:
    """What Prometheus scrapes: requests, tokens and times of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        seconds = partial(Histogram, labelnames=["model"], buckets=_SECONDS, registry=registry)
        count = partial(Counter, registry=registry)
        self.requests = count("sot_requests", "Requests answered or refused", ["model", "status"])
        self.tokens = count("sot_tokens", "Tokens of all model calls", ["model", "kind"])
        self.calls = count("sot_model_calls", "Model calls made for answers", ["model"])
        self.running = Gauge("sot_requests_running", "Requests being answered", registry=registry)
        self.seconds = seconds("sot_request_seconds", "From a request to the end of its answer")
        self.first_text = seconds("sot_first_text_seconds", "From a request to its first text")

    @contextmanager
    def request(self, model: str, answer: Answer | None = None) -> Iterator[Callable[[], None]]:
        """Counts a request and its ``answer``; the block calls what is yielded when there is text.

        Whatever a model raises is what its client is told. A request whose client disconnects has status 499.
        """
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
