"""A row is one span of OpenTelemetry if the application has set a provider."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import pytest
from opentelemetry import trace

from local_backend import ChatLocal, Engine, SamplingParams
from tests.local_backend.conftest import ragged_prompts


def test_a_row_is_a_span_with_its_figures(engine: Engine, spans: Any) -> None:
    prompts = ragged_prompts(3)
    completions = engine.generate(prompts, SamplingParams(max_tokens=7, drafter="jacobi"))
    recorded = spans.get_finished_spans()
    assert len(recorded) == len(prompts)
    by_input = {one.attributes["gen_ai.usage.input_tokens"]: one for one in recorded}
    for prompt, completion in zip(prompts, completions, strict=True):
        attributes = by_input[len(prompt)].attributes
        assert attributes["gen_ai.usage.output_tokens"] == len(completion.token_ids)
        assert attributes["gen_ai.response.finish_reasons"] == (completion.finish_reason,)
        assert attributes["local_backend.num_forwards"] == completion.stats.num_forwards
        assert attributes["local_backend.num_drafted"] == completion.stats.num_drafted > 0


def _wait_for_both(spans: Any) -> None:
    deadline = time.monotonic() + 20
    while len(spans.get_finished_spans()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("streams", [False, True])
async def test_it_belongs_to_the_callers_span(chat: ChatLocal, spans: Any, streams: bool) -> None:
    with trace.get_tracer("app").start_as_current_span("request"):
        if streams:
            async for _ in chat.astream("Hello", max_tokens=8):
                break  # the row is cancelled
        else:
            await chat.ainvoke("Hello", max_tokens=8)
    await asyncio.to_thread(_wait_for_both, spans)
    names = {one.name: one for one in spans.get_finished_spans()}
    row, request = names["forwards tiny"], names["request"]
    assert row.parent.span_id == request.context.span_id
    assert row.attributes["gen_ai.request.model"] == "tiny"


@pytest.mark.parametrize("is_installed", [False, True])
def test_without_a_provider_nothing_is_recorded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    if not is_installed:
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert engine.make_row([1, 2], lambda _: None).span is None
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].token_ids) == 2
