"""OpenTelemetry spans of rows, where the application has set a tracer provider; elsewhere nothing is done.

Who sets a provider has imported ``opentelemetry``, so the package is looked up and never imported here. Names
follow the conventions for generative AI: https://opentelemetry.io/docs/specs/semconv/gen-ai/.
"""

from __future__ import annotations

import sys
from typing import Any

from local_backend.sequences.outputs import Stats

_FIGURES = ("num_forwards", "num_drafted", "num_accepted", "num_prefilled", "num_preempted")


def begin_span(model_name: str | None, num_prompt_tokens: int) -> Any:
    """A span of a row's forwards, in the caller's context; ``None`` if nobody records it."""
    if (trace := sys.modules.get("opentelemetry.trace")) is None:
        return None
    name = str(model_name).rpartition("/")[2]  # of a path, or of a name on the hub
    known = {"gen_ai.operation.name": "text_completion", "gen_ai.request.model": name}
    span = trace.get_tracer("local_backend").start_span(f"forwards {name}", attributes=known)
    span.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)
    return span if span.is_recording() else None


def end_span(span: Any, stats: Stats, reason: str) -> None:
    """End a row's span with its figures, and ``reason``: why it has finished, or its error."""
    told = {"gen_ai.response.finish_reasons": [reason], "gen_ai.usage.output_tokens": stats.num_tokens}
    span.set_attributes(told | {f"local_backend.{name}": getattr(stats, name) for name in _FIGURES})
    span.end()
