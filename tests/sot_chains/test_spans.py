"""An answer is a trace of OpenTelemetry and its calls are spans in it, where somebody sets a provider."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from sot_chains import ProviderError, SkeletonOfThought
from sot_chains.providers.errors import Retries
from tests.sot_chains.fakes import ANSWER, QUESTION, REFUSED, FakeProvider, PacedChatModel, sot_of, what
from tests.tiny import tiny_chat

POINTS = ["point_1", "point_2", "point_3"]


def by_name(spans: Any, model: str = "paced") -> dict[str, Any]:
    """The spans by the first word of their names, all of one trace and none but one without a parent."""
    found = {one.name.split()[0]: one for one in spans.get_finished_spans()}
    assert len(found) == len(spans.get_finished_spans())
    assert len({one.context.trace_id for one in found.values()}) == 1
    assert [name for name, one in found.items() if one.parent is None] == ["answer"]
    for name, one in found.items():
        assert one.name == f"{name} {model}"
        assert name == "answer" or one.parent.span_id == found["answer"].context.span_id
    return found


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream", "astream_points"])
async def test_an_answer_is_one_trace_and_its_points_are_children(spans: Any, way: str) -> None:
    sot = sot_of(PacedChatModel(), conclusion=True)
    match way:
        case "invoke":
            message = sot.invoke(QUESTION)
        case "ainvoke":
            message = await sot.ainvoke(QUESTION)
        case "stream":
            *_, message = sot.stream(QUESTION)
        case "astream":
            *_, message = [chunk async for chunk in sot.astream(QUESTION)]
        case _:
            stream = sot.astream_points(QUESTION)
            assert [one async for one in stream]
            message = stream.message
    answer, told = message.response_metadata["sot"], by_name(spans)
    calls = [answer["skeleton_call"], *answer["points"], answer["conclusion"]]
    made = dict(zip(("skeleton", *POINTS, "conclusion"), calls, strict=True))
    assert set(told) == {*made, "answer"}
    for name, call in made.items():
        attributes = told[name].attributes
        assert tokens_of(told[name]) == (call["usage"]["input_tokens"], call["usage"]["output_tokens"])
        assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
        assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "paced"
        assert attributes["gen_ai.operation.name"] == "chat"
        assert told[name].status.status_code is StatusCode.UNSET
    assert all_tokens_are_told(told, message)


def tokens_of(span: Any) -> tuple[int, ...]:
    return tuple(span.attributes[f"gen_ai.usage.{name}_tokens"] for name in ("input", "output"))


def all_tokens_are_told(told: dict[str, Any], message: Any) -> bool:
    """Whether those of the answer are the sum of those of its calls, and what the message says."""
    parts = [tokens_of(one) for name, one in told.items() if name != "answer"]
    said = (message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"])
    return tokens_of(told["answer"]) == tuple(map(sum, zip(*parts, strict=True))) == said


async def test_it_is_one_trace_within_the_callers_span(spans: Any) -> None:
    with trace.get_tracer("app").start_as_current_span("request") as request:
        await sot_of(PacedChatModel()).ainvoke(QUESTION)
        await asyncio.to_thread(sot_of(PacedChatModel()).invoke, QUESTION)
    answers = [one for one in spans.get_finished_spans() if one.name == "answer paced"]
    assert [one.parent.span_id for one in answers] == [request.get_span_context().span_id] * 2


async def test_a_plain_answer_is_a_trace_of_one_call(spans: Any) -> None:
    message = await SkeletonOfThought(PacedChatModel(), router="never").ainvoke(QUESTION)
    told = by_name(spans)
    assert set(told) == {"plain", "answer"}
    assert told["plain"].attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert all_tokens_are_told(told, message)


async def test_a_point_that_fails_is_told_as_an_error_and_the_answer_is_not(spans: Any) -> None:
    model = PacedChatModel(fail=lambda messages: what(messages) == "Dark room")
    message = await sot_of(model, retries=Retries(max_attempts=2, first_pause_seconds=0)).ainvoke(QUESTION)
    told = by_name(spans)
    failed = [name for name, one in told.items() if one.status.status_code is StatusCode.ERROR]
    assert failed == ["point_2"]
    assert "the model broke" in told["point_2"].status.description
    assert tokens_of(told["point_2"])[1] > 0  # as estimated
    assert all_tokens_are_told(told, message)


async def test_an_answer_that_fails_is_told_as_an_error(spans: Any) -> None:
    with pytest.raises(ProviderError) as raised:
        await sot_of(FakeProvider(fault=lambda asked, attempt: REFUSED)).ainvoke(QUESTION)
    told = by_name(spans, model="fake")
    assert {name: one.status.status_code for name, one in told.items()} == dict.fromkeys(
        ("skeleton", "answer"), StatusCode.ERROR
    )
    assert raised.value.trace


async def test_what_a_deadline_cuts_is_told(spans: Any) -> None:
    model = PacedChatModel(pause=lambda messages: 30 if what(messages) == "Dark room" else 0)
    message = await sot_of(model).ainvoke(QUESTION, deadline_seconds=0.3)
    told = by_name(spans)
    assert set(told) == {"skeleton", *POINTS, "answer"}
    assert all_tokens_are_told(told, message)


async def test_rows_of_an_engine_are_children_of_the_calls(spans: Any) -> None:
    with tiny_chat() as chat:
        await sot_of(chat.model_copy(update={"max_tokens": 8})).ainvoke(QUESTION)
    found = {one.context.span_id: one for one in spans.get_finished_spans()}
    rows = [one for one in found.values() if one.name.startswith("forwards ")]
    assert rows
    for row in rows:
        call = found[row.parent.span_id]
        assert call.name.split()[0] in ("skeleton", "plain")
        assert found[call.parent.span_id].name.startswith("answer ")


def test_nothing_is_recorded_where_opentelemetry_is_not_in_use(
    spans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert sot_of(PacedChatModel()).invoke(QUESTION).text == ANSWER
    assert not spans.get_finished_spans()
