"""Another schedule than the paper's: points are written while the outline still is."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import BaseMessage

from sot_chains import ModelProfile, Price, Prompts, Retries, SkeletonOfThought
from tests.sot_chains.fakes import (
    ANSWER,
    BROKEN,
    EXPANSIONS,
    PLAIN,
    QUESTION,
    FakeProvider,
    nothing_runs,
    sot_of,
    what,
)

AT_ONCE = Retries(max_attempts=3, first_pause_seconds=0.0)


def outline(text: str) -> Any:
    def answer(messages: Sequence[BaseMessage]) -> str:
        asked = what(messages)
        return text if asked == "outline" else PLAIN if asked == "plain" else f"About {asked}."

    return answer


async def shown(sot: SkeletonOfThought, **kwargs: Any) -> tuple[str, dict[str, Any]]:
    chunks = [chunk async for chunk in sot.astream(QUESTION, **kwargs)]
    return "".join(chunk.text for chunk in chunks), chunks[-1].response_metadata["sot"]


# --- points begun early


@pytest.mark.parametrize("streamed", [False, True])
async def test_points_are_begun_while_the_outline_is_written(streamed: bool) -> None:
    provider = FakeProvider(between=lambda asked: 0.01 * (asked == "outline"))
    sot = sot_of(provider, eager=True)
    if streamed:
        text, trace = await shown(sot)
    else:
        message = await sot.ainvoke(QUESTION)
        text, trace = message.text, message.response_metadata["sot"]
    assert text == ANSWER
    assert trace["skeleton"] == list(EXPANSIONS)
    ends = trace["skeleton_call"]["end_seconds"]
    assert trace["points"][1]["start_seconds"] < ends
    # Its request shows the outline so far; of one point alone there is none.
    assert "1. Fixed hours\n2. Dark room\n\nWrite" in provider.requests[1]
    assert "2. Dark room\n3. Less coffee\n\nWrite" in provider.requests[3]
    assert trace["num_requests"] == 4
    assert await nothing_runs()


@given(
    st.lists(
        st.sampled_from(
            ["1. Plan", "2. Rest", "3. Plan", "3. More", "  - detail", "and on", "", "1. Again", "Well:"]
        ),
        max_size=8,
    ),
    st.sampled_from([None, 2]),
)
@settings(max_examples=60, deadline=None)
def test_the_points_are_those_of_the_plain_schedule(lines: list[str], max_points: int | None) -> None:
    """Whatever the outline looks like, and however often it changes its mind."""

    async def both() -> None:
        answers = []
        for eager in (False, True):
            provider = FakeProvider(answer=outline("\n".join(lines)))
            sot = sot_of(provider, eager=eager, max_points=max_points)
            message = await sot.ainvoke(QUESTION)
            answers.append((message.text, message.response_metadata["sot"]["skeleton"]))
            assert (await shown(sot))[0] == message.text
            assert provider.num_running == 0
        assert answers[0] == answers[1]

    asyncio.run(both())


async def test_an_outline_that_turns_out_to_be_none() -> None:
    provider = FakeProvider(answer=outline("1. Sure, I can\nwrite that.\n"), between=lambda _: 0.001)
    text, trace = await shown(sot_of(provider, eager=True))
    assert text == PLAIN
    assert trace["route"] == "plain"
    assert trace["num_requests"] == 2  # no point was begun in vain
    assert provider.num_running == 0


async def test_an_outline_that_breaks_is_begun_anew() -> None:
    provider = FakeProvider(
        fault=lambda asked, attempt: BROKEN if asked == "outline" and attempt == 0 else None,
        after_words=4,
        between=lambda asked: 0.002,
    )
    sot = sot_of(provider, eager=True, retries=AT_ONCE)
    assert (await sot.ainvoke(QUESTION)).text == ANSWER
    provider.asked.clear()
    assert (await shown(sot))[0] == ANSWER


async def test_an_outline_that_fails_while_points_are_written() -> None:
    provider = FakeProvider(
        fault=lambda asked, _: BROKEN if asked == "outline" else None,
        after_words=5,
        between=lambda asked: 0.002,
    )
    with pytest.raises(type(BROKEN), match="the line broke"):
        await sot_of(provider, eager=True, retries=AT_ONCE).ainvoke(QUESTION)
    assert provider.num_running == 0
    assert await nothing_runs()


async def test_a_deadline_while_the_outline_is_written() -> None:
    provider = FakeProvider(between=lambda asked: 0.03 if asked == "outline" else 0.0)
    sot = sot_of(provider, eager=True)
    text, trace = await shown(sot, deadline_seconds=0.21)
    assert text.startswith("1. **Fixed hours**: Go to bed at the same time.")
    assert not trace["is_complete"]
    assert trace["skeleton_reply"] is None  # so that it is asked for again when the answer is gone on with
    provider.between = lambda asked: 0.0
    assert (await sot.ainvoke(QUESTION, resume=trace)).text == ANSWER


async def test_short_requests_cost_less() -> None:
    price = Price(input=1.0, output=1.0)
    lengths = []
    for profile in (ModelProfile(prompts=Prompts()), ModelProfile.STRONG):
        provider = FakeProvider(answer=outline("1. One\n2. Two"), usage=None)
        await sot_of(provider, profile=profile, prices=price).ainvoke(QUESTION)
        lengths.append(sum(map(len, provider.requests)))
    assert lengths[1] < 0.65 * lengths[0]
    assert "要点" in Prompts.short().for_question("怎样才能睡得好？").expansion
