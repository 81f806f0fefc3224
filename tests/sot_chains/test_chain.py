"""What holds for every answer, however it is asked for."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel, FakeMessagesListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda

from sot_chains import ModelProfile, Point, Prompts, PromptTemplates
from sot_chains.calls.usage import NO_TOKENS
from tests.sot_chains.fakes import (
    ANSWER,
    EXPANSIONS,
    PLAIN,
    POINTS_ONLY,
    QUESTION,
    FakeProvider,
    LocalChatModel,
    PacedChatModel,
    answer_to,
    is_skeleton_request,
    nothing_runs,
    point_asked_for,
    sot_of,
)


async def text_of_stream(runnable: Runnable[Any, Any], question: Any, **kwargs: Any) -> str:
    return "".join([chunk.text async for chunk in runnable.astream(question, **kwargs)])


def first_point_is_slow(messages: Sequence[BaseMessage]) -> float:
    return 0.02 if point_asked_for(messages) == "Fixed hours" else 0.0


# --- the answer


async def test_points_are_written_at_once_and_put_in_order() -> None:
    model = PacedChatModel(pause=first_point_is_slow)
    message = await sot_of(model).ainvoke(QUESTION)
    assert isinstance(message, AIMessage)
    assert message.content == ANSWER
    assert model.most_running == 3
    assert model.num_running == 0
    assert message.id


async def test_usage_is_the_sum_over_all_calls() -> None:
    message = await sot_of(PacedChatModel()).ainvoke(QUESTION)
    assert message.usage_metadata == {"input_tokens": 4, "output_tokens": 21, "total_tokens": 25}
    trace = message.response_metadata["sot"]
    assert trace["usage"] == message.usage_metadata
    parts = [trace["skeleton_call"], *trace["points"]]
    assert sum(part["usage"]["total_tokens"] for part in parts) == 25


async def test_where_a_model_does_not_count_tokens_they_are_estimated() -> None:
    message = await sot_of(FakeProvider(usage=None)).ainvoke(QUESTION)
    trace = message.response_metadata["sot"]
    assert {point["usage"] for point in trace["points"]} == {None}
    assert message.usage_metadata == trace["usage"]
    assert trace["usage"]["output_tokens"] == trace["cost"]["estimated"]["output_tokens"] > 0
    assert trace["cost"]["reported"] == NO_TOKENS


async def test_trace() -> None:
    message = await sot_of(PacedChatModel(pause=0.002)).ainvoke(QUESTION)
    trace = message.response_metadata["sot"]
    assert json.loads(json.dumps(trace)) == trace
    assert message.response_metadata["model_name"] == "paced"
    assert trace["route"] == "sot"
    assert trace["skeleton"] == list(EXPANSIONS)
    assert [(p["number"], p["label"], p["text"]) for p in trace["points"]] == [
        (number, label, text) for number, (label, text) in enumerate(EXPANSIONS.items(), 1)
    ]
    skeleton = trace["skeleton_call"]
    for part in (skeleton, *trace["points"]):
        assert (
            0 <= part["start_seconds"] < part["first_text_seconds"] <= part["end_seconds"] <= trace["seconds"]
        )
        assert part["finish_reason"] == "stop"
    longest = max(p["end_seconds"] - p["start_seconds"] for p in trace["points"])
    assert trace["critical_path_seconds"] == pytest.approx(
        skeleton["end_seconds"] - skeleton["start_seconds"] + longest
    )
    assert skeleton["end_seconds"] <= trace["first_text_seconds"] <= trace["seconds"]
    assert trace["num_calls"] == 4
    assert '"index"' not in json.dumps(trace)


async def test_chunks_add_up_to_the_message() -> None:
    def without_times(message: AIMessage) -> Any:
        trace = json.loads(json.dumps(message.response_metadata["sot"]), parse_float=lambda _: None)
        return message.content, message.usage_metadata, message.response_metadata | {"sot": trace}

    for model in (PacedChatModel(), PacedChatModel(answer=lambda _: PLAIN)):
        sot = sot_of(model)
        chunks = [chunk async for chunk in sot.astream(QUESTION)]
        merged = sum(chunks[1:], chunks[0])
        assert without_times(merged) == without_times(await sot.ainvoke(QUESTION))
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(not chunk.response_metadata and not chunk.usage_metadata for chunk in chunks[:-1])


async def test_the_first_point_streams_while_the_others_are_written() -> None:
    model = PacedChatModel(pause=first_point_is_slow)
    seen = [(chunk.text, model.num_running) async for chunk in sot_of(model).astream(QUESTION)]
    assert "".join(text for text, _ in seen) == ANSWER
    assert seen[0] == ("1. **Fixed hours**", 1)  # with the first text of the point: it may come to nothing
    assert any(text == " to" for text, running in seen if running)


async def test_points_as_they_arrive() -> None:
    stream = sot_of(PacedChatModel(pause=first_point_is_slow)).astream_points(QUESTION)
    with pytest.raises(RuntimeError, match="not finished"):
        _ = stream.message
    deltas = [delta async for delta in stream]
    points = [Point(number, label) for number, label in enumerate(EXPANSIONS, 1)]
    assert [tuple(delta) for delta in deltas[:3]] == [(point, "") for point in points]
    for point in points:
        assert "".join(text for p, text in deltas if p == point) == EXPANSIONS[point.text]
    assert deltas[-1].point == points[0]  # the slow one, though first in the answer
    assert stream.message.content == ANSWER
    assert [delta async for delta in stream] == []
    assert await nothing_runs()


async def test_points_on_the_plain_route_have_no_point() -> None:
    stream = sot_of(PacedChatModel(answer=lambda _: PLAIN)).astream_points(QUESTION)
    deltas = [delta async for delta in stream]
    assert {delta.point for delta in deltas} == {None}
    assert "".join(delta.text for delta in deltas) == PLAIN == stream.message.content


@pytest.mark.parametrize("outline", ["", "garbage", "1. only one", "٣٤٥ \x00 ** 1.", "1. same\n2. Same"])
async def test_without_a_usable_outline_the_answer_is_plain(outline: str) -> None:
    model = PacedChatModel(
        answer=lambda ms: outline if is_skeleton_request(str(ms[-1].text)) else answer_to(ms)
    )
    message = await sot_of(model).ainvoke([("system", "Be brief."), ("user", QUESTION)])
    assert message.content == PLAIN
    trace = message.response_metadata["sot"]
    assert trace["route"] == "plain"
    assert "usable point" in trace["route_reason"]
    assert trace["points"] == []
    assert trace["plain_call"]["usage"]["output_tokens"] == 10
    assert model.requests[-1] == [SystemMessage("Be brief."), HumanMessage(QUESTION)]


async def test_max_points() -> None:
    message = await sot_of(PacedChatModel(), max_points=2).ainvoke(QUESTION)
    assert message.response_metadata["sot"]["skeleton"] == ["Fixed hours", "Dark room"]
    with pytest.raises(ValueError, match="at least 2, got 1"):
        sot_of(PacedChatModel(), max_points=1)


# --- the input


@pytest.mark.parametrize(
    "blank", ["", "  \n", [HumanMessage("")], [("user", " ")], [("user", "Hi"), ("user", "")]]
)
async def test_an_empty_question_is_named(blank: Any) -> None:
    model = PacedChatModel()
    with pytest.raises(ValueError, match="question is empty"):
        await sot_of(model).ainvoke(blank)
    with pytest.raises(ValueError, match="question is empty"):
        sot_of(model).invoke(blank)
    with pytest.raises(ValueError, match="question is empty"):
        await text_of_stream(sot_of(model), blank)
    assert not model.requests


async def test_input_that_asks_nothing() -> None:
    with pytest.raises(ValueError, match=r"no question.*\['system'\]"):
        await sot_of(PacedChatModel()).ainvoke([SystemMessage("Be brief.")])
    with pytest.raises(TypeError, match="got int"):
        await sot_of(PacedChatModel()).ainvoke(7)  # type: ignore[arg-type]  # the mistake under test


async def test_system_message_and_earlier_turns_reach_every_stage() -> None:
    model = PacedChatModel()
    earlier = [("system", "Be brief."), ("human", "Hello"), ("ai", "Hi!")]
    message = await sot_of(model).ainvoke([*earlier, ("human", QUESTION)])
    assert message.content == ANSWER
    assert len(model.requests) == 4
    for request in model.requests:
        assert [(m.type, m.content) for m in request[:-1]] == earlier
        assert request[-1].type == "human"
        assert QUESTION in request[-1].text


async def test_what_a_question_carries_besides_text_stays_with_it() -> None:
    image = {"type": "image", "url": "https://example.org/bed.png"}
    model = PacedChatModel()
    await sot_of(model).ainvoke([HumanMessage([{"type": "text", "text": QUESTION}, image])])
    for request in model.requests:
        blocks = request[-1].content
        assert blocks[0] == image
        assert QUESTION in blocks[1]["text"]  # type: ignore[index]  # a content block


async def test_a_conversation_that_goes_on_after_the_question_is_answered_plainly() -> None:
    call = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])
    messages = [HumanMessage(QUESTION), call, ToolMessage("curtains help", tool_call_id="1")]
    model = PacedChatModel()
    message = await sot_of(model).ainvoke(messages)
    assert message.content == PLAIN
    assert message.response_metadata["sot"]["skeleton_call"] is None
    assert model.requests == [messages]


async def test_the_language_of_the_question_is_that_of_the_requests() -> None:
    def answer(messages: Sequence[BaseMessage]) -> str:
        text = str(messages[-1].text)
        if (label := point_asked_for(messages)) is not None:
            return f"{label}很重要。"
        return "1、规律作息\n2、安静的卧室" if "提纲" in text else "no"

    message = await sot_of(PacedChatModel(answer=answer)).ainvoke("怎样才能睡得好？")
    assert message.content == "1. **规律作息**：规律作息很重要。\n\n2. **安静的卧室**：安静的卧室很重要。"


async def test_prompts_can_be_replaced() -> None:
    own = PromptTemplates(skeleton="Outline: {question}", expansion="{question}|{skeleton}|{number}|{point}")
    one_line = "1. a/2. b"

    def answer(messages: Sequence[BaseMessage]) -> str:
        text = str(messages[-1].text)
        if text.startswith("Outline: "):
            return "1. a\n2. b"
        return text.partition("\n\n")[0].replace("\n", "/")

    sot = sot_of(PacedChatModel(answer=answer), profile=ModelProfile(prompts=Prompts({"en": own})))
    message = await sot.ainvoke("Why?")
    assert message.content == f"1. **a**: Why?|{one_line}|1|a\n\n2. **b**: Why?|{one_line}|2|b"


# --- prefill


async def test_replies_are_begun_for_models_that_continue_them() -> None:
    def go_on(messages: Sequence[BaseMessage]) -> str:
        reply_start = str(messages[-1].text)
        return (
            " Fixed hours\n2. Dark room\n3. Less coffee"
            if reply_start == "1."
            else f" It is {reply_start[3:-1]}."
        )

    model = LocalChatModel(answer=go_on)
    for wrapped in (
        model,
        model.bind(),
        model.with_config(tags=["a"]),
        model.with_retry(),
        model | RunnableLambda(lambda x: x),
    ):
        message = await sot_of(wrapped, profile=POINTS_ONLY).ainvoke(QUESTION)
        assert message.text.startswith(
            "1. **Fixed hours**: It is Fixed hours.\n\n2. **Dark room**: It is Dark"
        )
    starts = {str(request[-1].text) for request in model.requests if request[-1].type == "ai"}
    assert starts == {"1.", "1. Fixed hours:", "2. Dark room:", "3. Less coffee:"}


async def test_a_model_that_begins_anew_after_all_is_understood() -> None:
    profile = ModelProfile(prefill=True)
    message = await sot_of(PacedChatModel(answer=_echoing), profile=profile).ainvoke(QUESTION)
    assert message.content == ANSWER


def _echoing(messages: Sequence[BaseMessage]) -> str:
    request = [message for message in messages if message.type == "human"][-1:]
    label = point_asked_for(request)
    if label is None:
        return answer_to(request)
    return f"{list(EXPANSIONS).index(label) + 1}. **{label}**: {EXPANSIONS[label]}"


# --- models of all kinds


async def test_any_runnable_that_answers_with_a_message() -> None:
    async def answer(messages: list[BaseMessage]) -> AIMessage:
        return AIMessage(answer_to(messages))

    blocks = RunnableLambda(lambda ms: AIMessage([{"type": "text", "text": answer_to(ms)}]))
    for model in (
        RunnableLambda(answer),
        blocks,
        PacedChatModel() | StrOutputParser(),
        PacedChatModel().bind(stop=["###"]),
    ):
        assert (await sot_of(model).ainvoke(QUESTION)).content == ANSWER
        assert await text_of_stream(sot_of(model), QUESTION) == ANSWER


async def test_langchains_own_fakes() -> None:
    replies = ["1. Plan\n2. Plan again", "Same.", "Same."]
    expected = "1. **Plan**: Same.\n\n2. **Plan again**: Same."
    assert (await sot_of(FakeListChatModel(responses=replies)).ainvoke(QUESTION)).content == expected
    messages = [AIMessage(reply) for reply in replies]
    assert (await sot_of(FakeMessagesListChatModel(responses=messages)).ainvoke(QUESTION)).content == expected


async def test_a_model_that_answers_with_something_else_is_named() -> None:
    sot = sot_of(RunnableLambda(lambda _: {"answer": 1}, name="dictator"))
    with pytest.raises(TypeError, match="dictator answered with dict"):
        await sot.ainvoke(QUESTION)
    assert await nothing_runs()


def test_models_that_are_none() -> None:
    with pytest.raises(ValueError, match='supported is "openai:MODEL"'):
        sot_of("elsewhere:large")
    with pytest.raises(ValueError, match=r"'gpt-4'.*supported is"):
        sot_of("gpt-4")
    with pytest.raises(ValueError, match="has no name"):
        sot_of("openai:")
    with pytest.raises(TypeError, match="got int"):
        sot_of(3)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(TypeError, match=r"\['base_url'\] go with a model named by a string"):
        sot_of(PacedChatModel(), base_url="http://127.0.0.1")


async def test_parameters_of_a_call_reach_the_model() -> None:
    model = PacedChatModel()
    await sot_of(model).ainvoke(QUESTION, stop=["END"], temperature=0.5)
    await text_of_stream(sot_of(model).bind(stop=["END"]), QUESTION, temperature=0.5)
    assert len(model.parameters) == 8
    for parameters in model.parameters:
        assert parameters.keys() == {"stop", "temperature"}
        assert parameters["stop"] == ["END"]


# --- six ways of being called


@pytest.fixture
def pipeline() -> Runnable[Any, str]:
    return (
        ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "{q}")])
        | sot_of(PacedChatModel())
        | StrOutputParser()
    )


def synchronously(pipeline: Runnable[Any, str]) -> None:
    question = {"q": QUESTION}
    assert pipeline.invoke(question) == ANSWER
    pieces = list(pipeline.stream(question))
    assert "".join(pieces) == ANSWER
    assert len(pieces) > 10
    assert pipeline.batch([question] * 3) == [ANSWER] * 3


def test_called_synchronously(pipeline: Runnable[Any, str]) -> None:
    synchronously(pipeline)


async def test_called_synchronously_inside_a_running_loop(pipeline: Runnable[Any, str]) -> None:
    synchronously(pipeline)


async def test_called_asynchronously(pipeline: Runnable[Any, str]) -> None:
    question = {"q": QUESTION}
    assert await pipeline.ainvoke(question) == ANSWER
    pieces = [piece async for piece in pipeline.astream(question)]
    assert "".join(pieces) == ANSWER
    assert len(pieces) > 10
    assert await pipeline.abatch([question] * 3) == [ANSWER] * 3
    assert await nothing_runs()


def test_invoke_and_then_ainvoke_on_one_object() -> None:
    sot = sot_of(PacedChatModel())
    for _ in range(2):
        assert sot.invoke(QUESTION).content == ANSWER
        assert asyncio.run(sot.ainvoke(QUESTION)).content == ANSWER


def test_schemas_and_graph(pipeline: Runnable[Any, str]) -> None:
    sot = sot_of(PacedChatModel())
    assert "anyOf" in sot.get_input_jsonschema()
    assert sot.get_output_jsonschema()["title"] == "AIMessage"
    assert any(node.name == "SkeletonOfThought" for node in pipeline.get_graph().nodes.values())


# --- concurrency


@pytest.mark.parametrize("bound", [1, 2])
async def test_max_concurrency_holds_for_one_answer(bound: int) -> None:
    model = PacedChatModel(pause=0.001)
    sot = sot_of(model)
    assert (await sot.ainvoke(QUESTION, {"max_concurrency": bound})).content == ANSWER
    assert await text_of_stream(sot, QUESTION, config={"max_concurrency": bound}) == ANSWER
    assert model.most_running == bound


@pytest.mark.parametrize("bound", [1, 3])
async def test_max_concurrency_holds_across_a_batch(bound: int) -> None:
    model = PacedChatModel(pause=0.001)
    messages = await sot_of(model).abatch([QUESTION] * 4, {"max_concurrency": bound})
    assert [message.content for message in messages] == [ANSWER] * 4
    assert model.most_running == bound
    assert sot_of(model).batch([QUESTION] * 2, {"max_concurrency": bound})[1].content == ANSWER
    assert model.most_running == bound


async def test_max_concurrency_of_nothing_would_wait_forever() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        await sot_of(PacedChatModel()).ainvoke(QUESTION, {"max_concurrency": 0})


# --- nothing left running


def one_point_fails(messages: Sequence[BaseMessage]) -> bool:
    return point_asked_for(messages) == "Dark room"


async def test_after_an_error() -> None:
    model = PacedChatModel(pause=0.001, fail=one_point_fails)
    sot = sot_of(model, on_failure="raise")
    with pytest.raises(RuntimeError, match="the model broke"):
        await sot.ainvoke(QUESTION)
    assert await nothing_runs(model)
    with pytest.raises(RuntimeError, match="the model broke"):
        await text_of_stream(sot, QUESTION)
    assert await nothing_runs(model)
    with pytest.raises(RuntimeError, match="the model broke"):
        [_ async for _ in sot.astream_points(QUESTION)]
    assert await nothing_runs(model)
    with pytest.raises(RuntimeError, match="the model broke"):
        list(sot.stream(QUESTION))
    assert model.num_running == 0


@pytest.mark.parametrize("after_seconds", [0.005, 0.03])  # during the skeleton, during the points
async def test_after_a_cancellation(after_seconds: float) -> None:
    model = PacedChatModel(pause=0.003)
    for work in (
        sot_of(model).ainvoke(QUESTION),
        text_of_stream(sot_of(model), QUESTION),
        sot_of(model).abatch([QUESTION] * 3),
    ):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, after_seconds)
        assert model.num_running == 0
        assert await nothing_runs(model)


async def test_after_leaving_a_stream_early() -> None:
    model = PacedChatModel(pause=0.001)
    sot = sot_of(model)
    async with aclosing(sot.astream(QUESTION)) as chunks:
        async for chunk in chunks:
            if " to" in chunk.text:
                break
    assert model.num_running == 0
    async for chunk in (sot | StrOutputParser()).astream(QUESTION):  # without closing it
        if " to" in chunk:
            break
    assert await nothing_runs(model)
    async for _ in sot.astream_points(QUESTION):
        break
    assert await nothing_runs(model)
    stream = sot.astream_points(QUESTION)
    await anext(stream)
    await stream.aclose()
    assert model.num_running == 0


def test_after_leaving_a_synchronous_stream_early() -> None:
    model = PacedChatModel(pause=0.001)
    for chunk in sot_of(model).stream(QUESTION):
        if " to" in chunk.text:
            break
    del chunk
    assert model.num_running == 0


async def test_a_failing_sibling_cancels_the_batch() -> None:
    model = PacedChatModel(pause=0.002, fail=lambda ms: "fail" in ms[-1].text)
    sot = sot_of(model)
    with pytest.raises(RuntimeError, match="the model broke"):
        await sot.abatch([QUESTION, "Why do I fail?", QUESTION])
    assert await nothing_runs(model)
    with pytest.raises(RuntimeError, match="the model broke"):
        sot.batch([QUESTION, "Why do I fail?"])
    assert model.num_running == 0
    for results in (
        await sot.abatch([QUESTION, "Why do I fail?"], return_exceptions=True),
        sot.batch([QUESTION, "Why do I fail?"], return_exceptions=True),
    ):
        assert results[0].content == ANSWER
        assert isinstance(results[1], RuntimeError)
    assert await sot.abatch([]) == sot.batch([]) == []
