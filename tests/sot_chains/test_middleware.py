"""Agents whose answers are written by points: tools as without it, and the text streams as it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, dynamic_prompt
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, PrivateAttr

from sot_chains.middleware import SkeletonMiddleware
from sot_chains.prompts.conversation import Conversation
from sot_chains.router import Route, Router
from tests.sot_chains.fakes import ANSWER, PLAIN, PacedChatModel, answer_to, nothing_runs

CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Tokyo"]
FOR_TOOLS = [f"How warm is it in {city}?" for city in CITIES]
FOR_POINTS = [f"How do I sleep well in {city}?" for city in CITIES]
LONG = " ".join([PLAIN] * 4)  # more words than a model writes before it calls a tool


@tool
def temperature(city: str) -> str:
    """The temperature in a city."""
    return f"{len(city)} degrees in {city}"


class ToolModel(PacedChatModel):
    """Calls a tool where it is asked for a temperature and has one, and repeats what the tool returns."""

    _calls: list[str] = PrivateAttr(default_factory=list)

    @property
    def calls(self) -> list[str]:
        return self._calls

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, Any]:
        return self.bind(tools=[one.name for one in tools], **kwargs)

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        last = messages[-1]
        city = str(last.text).rpartition(" ")[2].strip("?")
        if kwargs.get("tools") and last.type == "human" and str(last.text) in FOR_TOOLS:
            self._calls.append(city)
            for name, args in (("temperature", '{"city": '), (None, f'"{city}"}}')):
                call = {"name": name, "args": args, "id": name and f"call-{city}", "index": 0}
                chunk = AIMessageChunk(content="", tool_call_chunks=[{**call, "type": "tool_call_chunk"}])
                yield ChatGenerationChunk(message=chunk)
            return
        async for generated in super()._astream(messages, stop, run_manager, **kwargs):
            yield generated


def answer(messages: Sequence[BaseMessage]) -> str:
    if messages[-1].type == "tool":
        return f"It is {messages[-1].text}."
    said = answer_to(messages)
    return LONG if said == PLAIN else said


def make_agent(
    *middleware: AgentMiddleware[Any, Any, Any], tools: Any = (temperature,), **options: Any
) -> Any:
    model = ToolModel(answer=answer)
    return model, create_agent(model, tools=list(tools), middleware=list(middleware), **options)


def asked(question: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(question)]}


def kinds(messages: Sequence[BaseMessage]) -> list[tuple[str, str, list[Any]]]:
    calls = [one.tool_calls if isinstance(one, AIMessage) else [] for one in messages]
    return [
        (one.type, str(one.text), [call["args"] for call in of_one])
        for one, of_one in zip(messages, calls, strict=True)
    ]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_tools_are_called_as_without_it_and_other_answers_come_in_points(is_async: bool) -> None:
    plain_model, plain = make_agent()
    model, agent = make_agent(SkeletonMiddleware(router="always"))
    for question in FOR_TOOLS:
        state = await agent.ainvoke(asked(question)) if is_async else agent.invoke(asked(question))
        assert kinds(state["messages"]) == kinds((await plain.ainvoke(asked(question)))["messages"])
    assert model.calls == plain_model.calls == CITIES
    for question in FOR_POINTS:
        state = await agent.ainvoke(asked(question)) if is_async else agent.invoke(asked(question))
        _, message = state["messages"]
        assert message.text == ANSWER
        trace = message.response_metadata["sot"]
        assert trace["route"] == "sot"
        assert len(trace["points"]) == 3
        assert trace["usage"] == message.usage_metadata
        assert "tools" in trace["cost"]["stages"] or trace["cost"]["estimated"]  # what was dropped is counted
    assert await nothing_runs(model)


@pytest.mark.parametrize("question", [*FOR_TOOLS, *FOR_POINTS])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("is_kept", [False, True], ids=["", "checkpointer"])
async def test_streamed_text_is_the_final_text(question: str, is_async: bool, is_kept: bool) -> None:
    saver = InMemorySaver() if is_kept else None
    _, agent = make_agent(SkeletonMiddleware(router="always"), checkpointer=saver)
    config = {"configurable": {"thread_id": "one"}}
    modes = ["messages", "updates"]
    if is_async:
        events = [event async for event in agent.astream(asked(question), config, stream_mode=modes)]
    else:
        events = list(agent.stream(asked(question), config, stream_mode=modes))
    streamed: dict[str, str] = {}
    for mode, data in events:
        if mode == "messages":
            streamed[data[0].id] = streamed.get(data[0].id, "") + data[0].text
    updates = [update for mode, data in events if mode == "updates" for update in data.values()]
    final = [message for update in updates for message in update["messages"]]
    assert streamed == {message.id: str(message.text) for message in final}
    assert len([mode for mode, _ in events if mode == "messages"]) > len(final)
    city = question.rpartition(" ")[2].strip("?")
    told = f"{len(city)} degrees in {city}"
    expected = [ANSWER] if question in FOR_POINTS else ["", told, f"It is {told}."]
    assert [str(message.text) for message in final] == expected
    if is_kept:
        assert kinds((await agent.aget_state(config)).values["messages"])[1:] == kinds(final)


async def test_tool_calls_are_passed_on_without_delay() -> None:
    _, plain = make_agent()
    _, agent = make_agent(SkeletonMiddleware(router="always"))

    async def streamed(agent: Any) -> list[Any]:
        return [
            [(one["name"], one["args"], one["id"]) for one in chunk.tool_call_chunks]
            async for chunk, _ in agent.astream(asked(FOR_TOOLS[0]), stream_mode="messages")
            if isinstance(chunk, AIMessageChunk) and chunk.tool_call_chunks
        ]

    assert await streamed(agent) == await streamed(plain) != []


async def test_a_checkpointer_keeps_the_answer_and_the_next_question_is_asked_with_it() -> None:
    model, agent = make_agent(SkeletonMiddleware(router="always"), checkpointer=InMemorySaver())
    plain_model, plain = make_agent(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "one"}}
    for for_points, for_tools in zip(FOR_POINTS, FOR_TOOLS, strict=True):
        await agent.ainvoke(asked(for_points), config)
        state = await agent.ainvoke(asked(for_tools), config)
        await plain.ainvoke(asked(for_points), config)
        without = await plain.ainvoke(asked(for_tools), config)
    answers = {LONG: ANSWER}  # instead of a long plain answer there are points, and nothing else differs
    expected = [(kind, answers.get(text, text), calls) for kind, text, calls in kinds(without["messages"])]
    assert kinds(state["messages"]) == expected
    assert model.calls == plain_model.calls == CITIES
    assert sum(one.text == ANSWER for one in model.requests[-1]) == len(CITIES)


@pytest.mark.parametrize("question", [*FOR_TOOLS, *FOR_POINTS])
async def test_after_a_resume_it_ends_as_without_an_interruption(question: str) -> None:
    middleware = SkeletonMiddleware(router="always")
    _, whole = make_agent(middleware)
    _, agent = make_agent(middleware, checkpointer=InMemorySaver(), interrupt_before=["model", "tools"])
    config = {"configurable": {"thread_id": "one"}}
    state = await agent.ainvoke(asked(question), config)
    for _ in range(4):
        if (await agent.aget_state(config)).next:
            state = await agent.ainvoke(None, config)
    assert not (await agent.aget_state(config)).next
    assert kinds(state["messages"]) == kinds((await whole.ainvoke(asked(question)))["messages"])


class Traced(BaseCallbackHandler):
    """Notes the runs of chat models."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.names.append(kwargs.get("name") or "")


async def test_tracers_see_the_inner_calls() -> None:
    model, agent = make_agent(SkeletonMiddleware(router="always"), tools=())
    traced = Traced()
    await agent.ainvoke(asked(FOR_POINTS[0]), {"callbacks": [traced]})
    assert len(traced.names) >= 1 + len(model.requests)


async def test_a_model_without_tools_is_asked_for_points_at_once() -> None:
    model, agent = make_agent(SkeletonMiddleware(router="always"), tools=())
    state = await agent.ainvoke(asked(FOR_POINTS[0]))
    assert state["messages"][-1].text == ANSWER
    assert len(model.requests) == 4


class Report(BaseModel):
    """A report."""

    text: str


async def test_it_steps_aside_for_structured_output() -> None:
    seen: list[Any] = []

    class Last(AgentMiddleware[Any, Any, Any]):
        async def awrap_model_call(self, request: Any, handler: Callable[..., Any]) -> Any:
            seen.append(request.model)
            return AIMessage("")

    model, agent = make_agent(SkeletonMiddleware(router="always"), Last(), response_format=Report)
    await agent.ainvoke(asked(FOR_POINTS[0]))
    assert seen[0] is model


class Plainly(Router):
    """Takes no question for points."""

    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        return Route(False, "by request", 1.0, "test")


async def test_the_router_leaves_questions_to_the_agents_model() -> None:
    model, agent = make_agent(SkeletonMiddleware(router=Plainly()))
    state = await agent.ainvoke(asked(FOR_POINTS[0]))
    assert state["messages"][-1].text == LONG
    assert "sot" not in state["messages"][-1].response_metadata
    assert len(model.requests) == 1


async def test_it_sees_the_system_prompt_of_other_middleware() -> None:
    @dynamic_prompt
    def prompt(request: Any) -> str:
        return "You are a doctor."

    model, agent = make_agent(prompt, SkeletonMiddleware(router="always"), tools=())
    state = await agent.ainvoke(asked(FOR_POINTS[0]))
    assert state["messages"][-1].text == ANSWER
    assert all(str(one[0].text).startswith("You are a doctor.") for one in model.requests)
