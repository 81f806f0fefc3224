"""Points that build on others: they start once those are written, and read exactly their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from sot_chains import Limits, Point, ProviderError, Retries, Thought, ThoughtGraph
from sot_chains.outline import skeleton as dependencies
from sot_chains.outline.skeleton import parse_needs
from sot_chains.rendering import make_lane
from sot_chains.router import PromptedRouter
from tests.sot_chains.fakes import (
    EXPANSIONS,
    OUTLINE,
    PLAIN,
    QUESTION,
    FakeProvider,
    PacedChatModel,
    is_skeleton_request,
    nothing_runs,
    sot_of,
)

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
    provider = FakeProvider(
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
    again = await sot_of(FakeProvider(answer=answer), dependencies=True).ainvoke(QUESTION, resume=message)
    assert again.response_metadata["sot"]["is_complete"]
    assert [point["needs"] for point in again.response_metadata["sot"]["points"]] == [[], [], [1, 2]]


@pytest.mark.parametrize("eager", [False, True])
async def test_a_conclusion_is_written_with_all_points_in_view(eager: bool) -> None:
    model = PacedChatModel(answer=answer)
    sot = sot_of(model, dependencies=True, conclusion=True, eager=eager)
    message = await both(sot)
    assert message.text.endswith(f"{EXPANSIONS['Less coffee']}\n\n{CONCLUSION}")
    assert all(text in str(model.requests[4][-1].text) for text in EXPANSIONS.values())
    trace = message.response_metadata["sot"]
    assert trace["conclusion"]["start_seconds"] >= max(point["end_seconds"] for point in trace["points"])


async def test_what_was_written_from_a_cut_text_is_written_again() -> None:
    def cut(asked: str, attempt: int) -> Exception | None:
        return ProviderError("broken") if asked == "Fixed hours" else None

    provider = FakeProvider(answer=answer, after_words=2, fault=cut)
    sot = sot_of(provider, dependencies=True, conclusion=True, on_failure="retry", retries=AT_ONCE)
    trace = (await sot.ainvoke(QUESTION)).response_metadata["sot"]
    assert trace["points"][0]["status"] == "cut"
    # As if the model had been stopped at a number of tokens, which does not keep others from building on it.
    trace["points"][2] = {**trace["points"][2], "status": "complete", "text": "Written from half a text."}
    model = PacedChatModel(answer=answer)
    again = await both(sot_of(model, dependencies=True, conclusion=True), resume=trace)
    assert "half a text" not in again.text
    points = again.response_metadata["sot"]["points"]
    assert [point["is_resumed"] for point in points] == [False, True, False]
    assert EXPANSIONS["Fixed hours"] in request_for(model, "3. Less coffee")
    assert again.response_metadata["sot"]["route"] == "graph"
    # Nothing is missing now, and so nothing is written.
    whole = await both(sot_of(FakeProvider(answer=answer), conclusion=True), resume=again)
    assert whole.text == again.text
    assert whole.response_metadata["sot"]["num_calls"] == 0


async def test_a_thought_is_written_again_if_what_it_needs_is() -> None:
    graph = graph_of({1: [3], 2: [], 3: [2]}, PacedChatModel(answer=said), conclusion=True)
    trace = (await graph.ainvoke(QUESTION)).response_metadata["sot"]
    trace["points"][1] = {**trace["points"][1], "status": "cut"}
    again = (await both(graph, resume=trace)).response_metadata["sot"]
    assert [point["is_resumed"] for point in again["points"]] == [False, False, False]
    assert [again["is_complete"], again["conclusion"]["is_resumed"]] == [True, False]
    trace["points"][1] = {**trace["points"][1], "status": "complete"}
    trace["points"][2] = {**trace["points"][2], "status": "failed"}
    points = (await both(graph, resume=trace)).response_metadata["sot"]["points"]
    assert [point["is_resumed"] for point in points] == [False, True, False]


async def test_each_heading_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(heading: str, number: int) -> tuple[str, tuple[int, ...]]:
        read.append(number)
        return parse_needs(heading, number)

    monkeypatch.setattr(dependencies, "parse_needs", counted)
    lines = [f"{n}. Heading of number {n} (needs {max(1, n - 1)})" for n in range(1, 60)]

    def long(messages: Sequence[BaseMessage]) -> str:
        return "\n".join(lines) if is_skeleton_request(str(messages[-1].text)) else "So it is."

    for eager in (False, True):
        message = await sot_of(PacedChatModel(answer=long), dependencies=True, eager=eager).ainvoke(QUESTION)
        assert read == list(range(1, 60))
        needs = [point["needs"] for point in message.response_metadata["sot"]["points"]]
        assert needs == [[], *([n] for n in range(1, 59))]
        read.clear()


async def test_the_route_says_what_kind_of_answer_it_is() -> None:
    def route(message: Any) -> str:
        return str(message.response_metadata["sot"]["route"])

    model = PacedChatModel(answer=answer)
    assert route(await both(sot_of(model, dependencies=True))) == "graph"
    assert route(await both(graph_of({1: []}, PacedChatModel(answer=said)))) == "graph"
    assert route(await both(sot_of(model))) == "sot"
    unmarked = PacedChatModel(answer=lambda m: OUTLINE if (t := answer(m)) == MARKED else t)
    assert route(await both(sot_of(unmarked, dependencies=True))) == "sot"
    assert route(await both(sot_of(PacedChatModel(answer=lambda m: PLAIN), dependencies=True))) == "plain"


async def test_a_conclusion_that_fails_is_marked() -> None:
    def broken(messages: Sequence[BaseMessage]) -> str:
        if (text := answer(messages)) == CONCLUSION:
            raise ProviderError("broken")
        return text

    sot = sot_of(FakeProvider(answer=broken), conclusion=True, on_failure="raise", retries=AT_ONCE)
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
    provider = FakeProvider(
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


async def test_a_router_may_choose_the_graph() -> None:
    def routed(messages: Sequence[BaseMessage]) -> str:
        request = str(messages[-1].text)
        return "B" if "Reply with a single letter" in request else answer(messages)

    model = PacedChatModel(answer=routed)
    message = await both(sot_of(model, router=PromptedRouter(model, graphs=True)))
    trace = message.response_metadata["sot"]
    assert [point["needs"] for point in trace["points"]] == [[], [], [1, 2]]
    assert message.text.endswith(CONCLUSION)
    assert trace["route"] == "graph"
    # It stays one where it is resumed, without asking the router.
    trace["conclusion"]["status"] = "omitted"
    again = await sot_of(model, router=PromptedRouter(model, graphs=True)).ainvoke(QUESTION, resume=trace)
    assert again.text == message.text
    plain = await both(sot_of(model, router=PromptedRouter(model)))
    assert plain.response_metadata["sot"]["route"] == "plain"


async def test_what_stands_around_the_points_is_shown() -> None:
    model = PacedChatModel(answer=answer)
    message = await sot_of(model, dependencies=True, conclusion=True).ainvoke(QUESTION)
    lane = make_lane("sot", "Skeleton-of-Thought", message)
    assert [(point["number"], point["label"]) for point in lane.points][-2:] == [(3, "Less coffee"), (0, "")]
    assert [label for label, _ in lane.calls][-2:] == ["3. Less coffee (after 1, 2)", "conclusion"]
