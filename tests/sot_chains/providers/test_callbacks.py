"""What LangChain's handlers, its event stream and LangGraph see of an answer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tracers import BaseTracer
from langchain_core.tracers.schemas import Run
from langgraph.graph import END, START, MessagesState, StateGraph

from sot_chains import SkeletonOfThought
from tests.sot_chains.fakes import ANSWER, PLAIN, QUESTION, PacedChatModel, sot_of

CALLS = ["skeleton", "point_1", "point_2", "point_3"]


class Recorder(BaseTracer):
    """Keeps the finished root runs, with their children."""

    def __init__(self) -> None:
        super().__init__()
        self.roots: list[Run] = []

    def _persist_run(self, run: Run) -> None:
        self.roots.append(run)


def slow_first_point(messages: list[BaseMessage]) -> float:
    return 0.002 if "1. Fixed hours" in str(messages[-1].text)[-200:] else 0.0


async def test_each_call_is_a_named_child_run() -> None:
    recorder = Recorder()
    run_id = uuid4()
    config = RunnableConfig(
        callbacks=[recorder], run_name="mine", run_id=run_id, tags=["t"], metadata={"m": 1}
    )
    message = await sot_of(PacedChatModel()).ainvoke(QUESTION, config)
    (root,) = recorder.roots
    assert (root.name, root.id, root.run_type) == ("mine", run_id, "chain")
    assert message.id == f"lc_run--{run_id}"
    assert [child.name for child in root.child_runs] == ["answer", *CALLS]
    for child in root.child_runs:
        assert child.parent_run_id == run_id
        assert child.run_type in {"llm", "chat_model"}
        assert "t" in (child.tags or [])
        assert child.extra["metadata"]["m"] == 1
        assert ("nostream" in (child.tags or [])) == (child.name != "answer")


async def test_an_error_is_told_to_all_runs() -> None:
    recorder = Recorder()
    model = PacedChatModel(fail=lambda ms: "Your point is 2" in ms[-1].text)
    with pytest.raises(RuntimeError, match="the model broke"):
        await sot_of(model, on_failure="raise").ainvoke(QUESTION, {"callbacks": [recorder]})
    (root,) = recorder.roots
    assert root.error is not None
    assert next(child for child in root.child_runs if child.name == "answer").error is not None
    assert all(child.end_time for child in root.child_runs)


@pytest.mark.parametrize("way", ["ainvoke", "invoke", "astream", "stream", "astream_points"])
async def test_tokens_are_counted_once(way: str) -> None:
    usage = UsageMetadataCallbackHandler()
    sot, config = sot_of(PacedChatModel()), RunnableConfig(callbacks=[usage])
    match way:
        case "ainvoke":
            await sot.ainvoke(QUESTION, config)
        case "invoke":
            sot.invoke(QUESTION, config)
        case "astream":
            [_ async for _ in sot.astream(QUESTION, config)]
        case "stream":
            list(sot.stream(QUESTION, config))
        case _:
            [_ async for _ in sot.astream_points(QUESTION, config)]
    assert usage.usage_metadata["paced"]["total_tokens"] == 25


async def test_events_show_points_by_name_and_the_answer_in_order() -> None:
    sot = sot_of(PacedChatModel(pause=slow_first_point))
    events = [event async for event in sot.astream_events(QUESTION, version="v2")]
    started = [event["name"] for event in events if event["event"] == "on_chat_model_start"]
    assert started == ["answer", *CALLS] or set(started) == {"answer", *CALLS}
    ended = [event["name"] for event in events if event["event"] == "on_chat_model_end"]
    assert set(ended) == set(started)
    texts: dict[str, str] = {}
    for event in events:
        if event["event"] == "on_chat_model_stream":
            texts[event["name"]] = texts.get(event["name"], "") + event["data"]["chunk"].text
    assert texts["answer"] == ANSWER
    assert texts["point_2"] == "Close the curtains."
    root = [event["data"]["chunk"] for event in events if event["event"] == "on_chain_stream"]
    assert "".join(chunk.text for chunk in root) == ANSWER
    filtered = sot.astream_events(QUESTION, version="v2", exclude_tags=["nostream"])
    assert {e["name"] async for e in filtered} == {"SkeletonOfThought", "answer"}


class Graph:
    """A graph of one node that answers, in one of the ways a node may call a Runnable."""

    def __init__(self, sot: SkeletonOfThought, way: str) -> None:
        self.sot = sot
        node = {
            "ainvoke": self._ainvoke,
            "ainvoke without config": self._ainvoke_without_config,
            "astream": self._astream,
            "invoke": self._invoke,
            "stream": self._stream,
        }[way]
        builder = StateGraph(MessagesState)
        builder.add_node("node", node)
        builder.add_edge(START, "node")
        builder.add_edge("node", END)
        self.graph = builder.compile()

    async def _ainvoke(self, state: MessagesState, config: RunnableConfig) -> Any:
        return {"messages": [await self.sot.ainvoke(state["messages"], config)]}

    async def _ainvoke_without_config(self, state: MessagesState) -> Any:
        return {"messages": [await self.sot.ainvoke(state["messages"])]}

    async def _astream(self, state: MessagesState, config: RunnableConfig) -> Any:
        chunks = [chunk async for chunk in self.sot.astream(state["messages"], config)]
        return {"messages": [sum(chunks[1:], chunks[0])]}

    def _invoke(self, state: MessagesState, config: RunnableConfig) -> Any:
        return {"messages": [self.sot.invoke(state["messages"], config)]}

    def _stream(self, state: MessagesState, config: RunnableConfig) -> Any:
        chunks = list(self.sot.stream(state["messages"], config))
        return {"messages": [sum(chunks[1:], chunks[0])]}

    async def aread(self) -> AsyncIterator[Any]:
        async for message, _ in self.graph.astream(
            {"messages": [("user", QUESTION)]}, stream_mode="messages"
        ):
            yield message

    def read(self) -> list[Any]:
        return [m for m, _ in self.graph.stream({"messages": [("user", QUESTION)]}, stream_mode="messages")]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("way", ["ainvoke", "ainvoke without config", "astream", "invoke", "stream"])
async def test_langgraph_streams_the_answer_in_order_and_once(way: str, plain: bool) -> None:
    model = PacedChatModel(answer=lambda _: PLAIN) if plain else PacedChatModel(pause=slow_first_point)
    messages = [message async for message in Graph(sot_of(model), way).aread()]
    assert "".join(message.text for message in messages) == (PLAIN if plain else ANSWER)
    assert len(messages) > 5
    assert len({message.id for message in messages}) == 1


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_langgraph_called_synchronously(way: str) -> None:
    messages = Graph(sot_of(PacedChatModel(pause=slow_first_point)), way).read()
    assert "".join(message.text for message in messages) == ANSWER
    assert len(messages) > 5
    assert all(isinstance(message, AIMessageChunk) for message in messages)


async def test_the_graphs_final_state_holds_the_answer_and_its_trace() -> None:
    state = await Graph(sot_of(PacedChatModel()), "ainvoke").graph.ainvoke({"messages": [("user", QUESTION)]})
    assert state["messages"][-1].content == ANSWER
    assert state["messages"][-1].response_metadata["sot"]["route"] == "sot"


async def test_handlers_of_concurrent_answers_are_kept_apart() -> None:
    class Names(BaseCallbackHandler):
        def __init__(self) -> None:
            self.names: list[str] = []

        def on_chat_model_start(
            self, *args: Any, run_id: UUID, name: str | None = None, **kwargs: Any
        ) -> None:
            self.names.append(str(name))

    handlers = [Names() for _ in range(3)]
    sot = sot_of(PacedChatModel(pause=0.001))
    await asyncio.gather(*(sot.ainvoke(QUESTION, {"callbacks": [handler]}) for handler in handlers))
    configs = [RunnableConfig(callbacks=[handler]) for handler in handlers]
    await sot.abatch([QUESTION] * 3, configs)
    for handler in handlers:
        assert sorted(handler.names) == sorted(["answer", *CALLS] * 2)
