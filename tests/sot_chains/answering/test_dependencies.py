"""Points that build on others: they start once those are written, and read exactly their text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import BaseMessage

from sot_chains import Limits, Point, ProviderError, Retries, Thought, ThoughtGraph
from sot_chains.display import timeline
from sot_chains.rendering import lane_of
from sot_chains.router import PromptedRouter
from tests.sot_chains.fakes import (
    EXPANSIONS,
    OUTLINE,
    PLAIN,
    QUESTION,
    PacedChatModel,
    is_skeleton_request,
    nothing_runs,
    sot_of,
)
from tests.sot_chains.faulty import FaultyProvider

MARKED = "1. Fixed hours\n2. Dark room\n3. Less coffee (needs 1, 2)"
CONCLUSION = "So keep to it."
AT_ONCE = Retries(max_attempts=1)


def answer(messages: Sequence[BaseMessage]) -> str:
    request = str(messages[-1].text)
    if "Write only the conclusion" in request:
        return CONCLUSION
    if is_skeleton_request(request):
        return MARKED
    asked = request.rpartition("Your point is")[2].partition("\n")[0]
    return next((text for name, text in EXPANSIONS.items() if name in asked), PLAIN)


def request_for(model: PacedChatModel, heading: str) -> str:
    texts = [str(messages[-1].text) for messages in model.requests]
    return next(text for text in texts if f"Your point is {heading}" in text)


async def both(sot: Any, **arguments: Any) -> Any:
    message = await sot.ainvoke(QUESTION, **arguments)
    assert "".join([chunk.text async for chunk in sot.astream(QUESTION, **arguments)]) == message.text
    assert await nothing_runs()
    return message


async def test_a_marked_point_reads_what_it_builds_on() -> None:
    model = PacedChatModel(answer=answer)
    trace = (await both(sot_of(model, dependencies=True))).response_metadata["sot"]
    assert trace["skeleton"] == ["Fixed hours", "Dark room", "Less coffee"]
    assert [point["needs"] for point in trace["points"]] == [[], [], [1, 2]]
    last = request_for(model, "3. Less coffee")
    assert last.endswith(
        f"1. Fixed hours: {EXPANSIONS['Fixed hours']}\n\n2. Dark room: {EXPANSIONS['Dark room']}"
    )
    assert EXPANSIONS["Fixed hours"] not in request_for(model, "2. Dark room")
    ends = [point["end_seconds"] for point in trace["points"]]
    assert trace["points"][2]["start_seconds"] >= max(ends[:2])
    assert trace["critical_path_seconds"] <= trace["seconds"]


async def test_without_marks_the_requests_are_those_of_the_plain_fan_out() -> None:
    def unmarked(messages: Sequence[BaseMessage]) -> str:
        text = answer(messages)
        return OUTLINE if text == MARKED else text

    plain, marking = PacedChatModel(answer=unmarked), PacedChatModel(answer=unmarked)
    assert (await both(sot_of(plain))).text == (await both(sot_of(marking, dependencies=True))).text
    assert plain.requests[1:4] == marking.requests[1:4]


@pytest.mark.parametrize("policy", ["retry", "omit"])
@pytest.mark.parametrize("after_words", [0, 2])
async def test_a_failure_marks_the_points_that_build_on_it(policy: Any, after_words: int) -> None:
    provider = FaultyProvider(
        answer=answer,
        after_words=after_words,
        fault=lambda asked, attempt: ProviderError("broken") if asked == "Dark room" else None,
    )
    message = await both(sot_of(provider, dependencies=True, on_failure=policy, retries=AT_ONCE))
    trace = message.response_metadata["sot"]
    status = "failed" if policy == "retry" else "omitted"
    own = "cut" if after_words and policy == "retry" else status
    assert [point["status"] for point in trace["points"]] == ["complete", own, status]
    assert trace["failures"][1]["reason"] == "it builds on 2, of which there is no whole text"
    again = await sot_of(FaultyProvider(answer=answer), dependencies=True).ainvoke(QUESTION, resume=message)
    assert again.response_metadata["sot"]["is_complete"]
    assert [point["needs"] for point in again.response_metadata["sot"]["points"]] == [[], [], [1, 2]]


@pytest.mark.parametrize("eager", [False, True])
async def test_a_conclusion_is_written_with_all_points_in_view(eager: bool) -> None:
    model = PacedChatModel(answer=answer)
    sot = sot_of(model, dependencies=True, conclusion=True, eager=eager)
    message = await both(sot)
    assert message.text.endswith(f"{EXPANSIONS['Less coffee']}\n\n{CONCLUSION}")
    assert all(text in str(model.requests[4][-1].text) for text in EXPANSIONS.values())
    first = await both(sot_of(model, conclusion="first"))
    assert first.text.startswith(f"{CONCLUSION}\n\n1. **")
    trace = first.response_metadata["sot"]
    assert trace["conclusion"]["start_seconds"] >= max(point["end_seconds"] for point in trace["points"])


async def test_a_conclusion_that_fails_is_marked() -> None:
    def broken(messages: Sequence[BaseMessage]) -> str:
        if (text := answer(messages)) == CONCLUSION:
            raise ProviderError("broken")
        return text

    sot = sot_of(FaultyProvider(answer=broken), conclusion=True, on_failure="raise", retries=AT_ONCE)
    trace = (await both(sot)).response_metadata["sot"]
    assert not trace["is_complete"]
    assert trace["conclusion"]["status"] == "omitted"


# --- graphs that are given


def said(messages: Sequence[BaseMessage]) -> str:
    return f"It is {str(messages[-1].text).split('.')[0].upper()}!"


def graph_of(edges: dict[int, list[int]], model: Any, **options: Any) -> ThoughtGraph:
    thoughts = [
        Thought(name=f"t{number}", prompt=f"Write t{number}.", needs=tuple(f"t{need}" for need in needs))
        for number, needs in edges.items()
    ]
    return ThoughtGraph(model, thoughts, **options)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 50), st.floats(0.0, 0.3), st.integers(0, 10_000), st.sampled_from([None, 1, 3]))
def test_any_graph_is_written_in_the_order_of_its_edges(
    num_nodes: int, density: float, seed: int, bound: int | None
) -> None:
    rng = random.Random(seed)
    order = rng.sample(range(num_nodes), num_nodes)
    edges = {n: [m for m in order[: order.index(n)] if rng.random() < density] for n in range(num_nodes)}
    written: list[str] = []

    async def run() -> None:
        model = PacedChatModel(
            answer=lambda messages: written.append(str(messages[-1].text)) or "Done it is."
        )
        config: Any = {"max_concurrency": bound} if bound else None
        message = await graph_of(edges, model).ainvoke(QUESTION, config)
        assert bound is None or model.most_running <= bound
        points = message.response_metadata["sot"]["points"]
        assert [point["label"] for point in points] == [f"t{number}" for number in range(num_nodes)]
        for point in points:
            for need in point["needs"]:
                assert points[need - 1]["end_seconds"] <= point["start_seconds"]
        # Nothing waits for anything else: without a bound, all that may be written at once is.
        level: dict[int, int] = {}
        for node in order:
            level[node] = 1 + max((level[need] for need in edges[node]), default=0)
        assert sorted(len(point["needs"]) for point in points) == sorted(map(len, edges.values()))
        if bound is None and num_nodes > 1 and max(level.values()) == 1:
            assert model.most_running == num_nodes

    asyncio.run(run())
    assert len(written) == num_nodes


async def test_thoughts_read_the_question_and_each_other() -> None:
    model = PacedChatModel(answer=said)
    graph = ThoughtGraph(
        model,
        [
            Thought(name="Sum", prompt="add. Up {Costs} for {question}", needs=("Notes",)),
            Thought(name="Costs", prompt="costs. Of {question}"),
            Thought(name="Notes", prompt="notes. {{}}"),
        ],
        conclusion=True,
    )
    message = await both(graph)
    texts = [str(messages[-1].text) for messages in model.requests[:4]]
    assert f"add. Up It is COSTS! for {QUESTION}\n\nNotes: It is NOTES!" in texts
    assert "notes. {}" in texts
    assert message.text.startswith(
        "1. **Sum**: It is ADD!\n\n2. **Costs**: It is COSTS!\n\n3. **Notes**: It is NOTES!\n\n"
    )
    assert graph.points[0] == Point(1, "Sum", (2, 3))
    assert graph.mermaid().endswith("n2 --> n1\n    n3 --> n1")


async def test_limits_hold_and_missing_thoughts_are_resumed() -> None:
    provider = FaultyProvider(
        answer=lambda messages: "Done it is.",
        fault=lambda asked, attempt: ProviderError("broken") if attempt == 0 else None,
    )
    graph = graph_of(
        {1: [], 2: [1], 3: []}, provider, retries=AT_ONCE, limits=Limits(requests_per_minute=100)
    )
    first = await graph.ainvoke(QUESTION)
    assert [point["status"] for point in first.response_metadata["sot"]["points"]] != ["complete"] * 3
    again = await graph.ainvoke(QUESTION, resume=first)
    assert again.response_metadata["sot"]["is_complete"]


@pytest.mark.parametrize(
    ("edges", "match"),
    [({}, "at least one"), ({1: [2], 2: [1]}, "in a circle: t"), ({1: [7]}, r"builds on \['t7'\]")],
)
def test_graphs_that_cannot_be_written_are_refused(edges: dict[int, list[int]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        graph_of(edges, PacedChatModel())


async def test_a_graph_becomes_one_of_langgraph_and_comes_back() -> None:
    model = PacedChatModel(answer=said)
    thoughts = {"Costs": "costs. Of {question}", "Sum": "add. Up {Costs}", "Notes": "notes."}
    graph = ThoughtGraph(model, thoughts)
    compiled = graph.to_langgraph()
    state = await compiled.ainvoke({"question": QUESTION, "texts": {}})
    assert state["texts"] == {"Costs": "It is COSTS!", "Sum": "It is ADD!", "Notes": "It is NOTES!"}
    back = ThoughtGraph.from_langgraph(model, compiled, thoughts)
    assert {p.text: len(p.needs) for p in back.points} == {"Costs": 0, "Sum": 1, "Notes": 0}
    with pytest.raises(ValueError, match="prompts has none for the nodes"):
        ThoughtGraph.from_langgraph(model, compiled, {"Costs": "a"})


async def test_a_router_may_choose_the_graph() -> None:
    def routed(messages: Sequence[BaseMessage]) -> str:
        request = str(messages[-1].text)
        return "B" if "Reply with a single letter" in request else answer(messages)

    model = PacedChatModel(answer=routed)
    message = await both(sot_of(model, router=PromptedRouter(model, graphs=True)))
    trace = message.response_metadata["sot"]
    assert [point["needs"] for point in trace["points"]] == [[], [], [1, 2]]
    assert message.text.endswith(CONCLUSION)
    plain = await both(sot_of(model, router=PromptedRouter(model)))
    assert plain.response_metadata["sot"]["route"] == "plain"


async def test_the_timeline_shows_what_points_wait_for() -> None:
    message = await both(sot_of(PacedChatModel(answer=answer), dependencies=True, conclusion=True))
    labels = [label.get_text() for label in timeline(message).axes[0].get_yticklabels()]
    assert labels[-2:] == ["3. Less coffee (after 1, 2)", "conclusion"]


async def test_what_stands_around_the_points_is_shown() -> None:
    model = PacedChatModel(answer=answer)
    message = await sot_of(model, dependencies=True, conclusion=True).ainvoke(QUESTION)
    lane = lane_of("sot", "Skeleton-of-Thought", message)
    assert [block.heading for block in lane.blocks][-2:] == ["3. Less coffee", ""]
    assert [bar.label for bar in lane.bars][-1] == "conclusion"
