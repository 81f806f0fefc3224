"""What small local models write before the points, beside the outline."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from sot_chains import ENGLISH, Budget, ProviderError, Retries
from tests.sot_chains.fakes import ANSWER, EXPANSIONS, OUTLINE, PLAIN, QUESTION, nothing_runs, sot_of
from tests.sot_chains.faulty import FaultyProvider, what

OPENING = "Sleep comes to those who keep the same hours."
AT_ONCE = Retries(max_attempts=2, first_pause_seconds=0.0)


def answers(introduction: str = OPENING, outline: str = OUTLINE) -> Any:
    said = {"introduction": introduction, "outline": outline, "plain": PLAIN, **EXPANSIONS}

    def answer(messages: Sequence[BaseMessage]) -> str:
        text = said[what(messages)]
        return text.removeprefix("1.") if str(messages[-1].text) == "1." else text

    return answer


async def both(provider: FaultyProvider, **options: Any) -> Any:
    """The answer, which is the same whole and streamed."""
    sot = sot_of(provider, max_points=3, retries=AT_ONCE, **options)
    message = await sot.ainvoke(QUESTION)
    assert "".join([chunk.text async for chunk in sot.astream(QUESTION)]) == message.text
    async with aclosing(sot.astream_points(QUESTION)) as stream:
        shown = "".join([text async for point, text in stream if point is None])
    introduction = message.response_metadata["sot"]["introduction"]
    if message.response_metadata["sot"]["route"] == "sot":
        assert shown == (introduction["text"] if introduction else "")
    assert await nothing_runs()
    assert provider.num_running == 0
    return message


async def test_it_stands_before_the_points_and_is_written_beside_the_outline() -> None:
    begun: list[str] = []

    def pause(asked: str, attempt: int) -> float:
        begun.append(asked)
        return 0.02 if asked == "outline" else 0.0

    message = await both(FaultyProvider(answer=answers(), supports_prefill=True, pause=pause))
    assert message.text == f"{OPENING}\n\n{ANSWER}"
    assert set(begun[:2]) == {"outline", "introduction"}
    trace = message.response_metadata["sot"]
    assert trace["introduction"]["text"] == OPENING
    assert trace["is_complete"]
    assert [point["number"] for point in trace["points"]] == [1, 2, 3]


async def test_one_that_is_late_holds_up_no_point() -> None:
    provider = FaultyProvider(
        answer=answers(),
        supports_prefill=True,
        pause=lambda asked, attempt: 0.05 if asked == "introduction" else 0.0,
    )
    message = await both(provider)
    assert message.text == f"{OPENING}\n\n{ANSWER}"
    trace = message.response_metadata["sot"]
    assert all(point["end_seconds"] < trace["introduction"]["end_seconds"] for point in trace["points"])


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("", None),
        (ENGLISH.examples[0].introduction, None),  # the copy of an example
        (OPENING, ProviderError("cannot be asked", is_retryable=False)),
        (OPENING, RuntimeError("the model broke")),
    ],
)
async def test_an_answer_is_whole_without_it(said: str, fault: Exception | None) -> None:
    provider = FaultyProvider(
        answer=answers(said),
        supports_prefill=True,
        fault=lambda asked, attempt: fault if asked == "introduction" else None,
    )
    message = await both(provider, on_failure="raise")
    assert message.text == ANSWER
    assert message.response_metadata["sot"]["is_complete"]


async def test_a_plain_answer_has_none_and_does_not_wait_for_it() -> None:
    provider = FaultyProvider(
        answer=answers(outline="I cannot say."),
        supports_prefill=True,
        between=lambda asked: 0.05 if asked == "introduction" else 0.0,
    )
    message = await both(provider)
    trace = message.response_metadata["sot"]
    assert (message.text, trace["route"], trace["introduction"]) == (PLAIN, "plain", None)


async def test_it_is_no_answer_by_itself() -> None:
    provider = FaultyProvider(
        answer=answers(),
        supports_prefill=True,
        fault=lambda asked, attempt: RuntimeError("broken") if asked in EXPANSIONS else None,
    )
    with pytest.raises(RuntimeError, match="broken"):
        await sot_of(provider, max_points=3, retries=AT_ONCE).ainvoke(QUESTION)


async def test_it_is_taken_over_when_an_answer_is_resumed() -> None:
    def fault(asked: str, attempt: int) -> Exception | None:
        return RuntimeError("broken") if asked == "Dark room" and attempt == 0 else None

    provider = FaultyProvider(answer=answers(), supports_prefill=True, fault=fault)
    sot = sot_of(provider, max_points=3, retries=AT_ONCE)
    first = await sot.ainvoke(QUESTION)
    assert not first.response_metadata["sot"]["is_complete"]
    again = await sot.ainvoke(QUESTION, resume=first)
    assert again.text == f"{OPENING}\n\n{ANSWER}"
    assert again.response_metadata["sot"]["introduction"]["is_resumed"]


@pytest.mark.parametrize("options", [{"detail": "brief"}, {"budget": Budget(tokens=100_000)}])
async def test_it_is_not_asked_for(options: dict[str, Any]) -> None:
    message = await both(FaultyProvider(answer=answers(), supports_prefill=True), **options)
    assert message.text == ANSWER


async def test_models_that_are_paid_by_the_call_are_not_asked_for_it() -> None:
    assert (await both(FaultyProvider(answer=answers()))).text == ANSWER
