"""A local model begins a plain answer beside the outline, which is the answer if it is whole before."""

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from sot_chains import SkeletonOfThought
from tests.sot_chains.fakes import ANSWER, EXPANSIONS, OUTLINE, PLAIN, QUESTION, PacedChatModel, nothing_runs
from tests.sot_chains.faulty import what
from tests.sot_chains.router.test_routers import Always

OPENING = "Sleep comes to those who keep the same hours."
LINE = "the cat sat on the mat and looked at me, "


class Local(PacedChatModel):
    """Has weights, so that it is one whose rows share a batch."""

    num_parameters: int = 135_000_000


def local(plain: str = PLAIN, outline: str = OUTLINE, slow: str = "", **options: Any) -> Local:
    """A model that takes its time for what ``slow`` says."""
    said = {"introduction": OPENING, "outline": outline, "plain": plain, **EXPANSIONS}

    def answer(messages: Sequence[BaseMessage]) -> str:
        text = said[what(messages)]
        return text.removeprefix("1.") if str(messages[-1].text) == "1." else text

    def pause(messages: Sequence[BaseMessage]) -> float:
        return 0.03 if what(messages) == slow else 0.0

    return Local(answer=answer, pause=pause, supports_assistant_prefill=True, **options)


async def both(model: Local, *, use_router: bool = True, **options: Any) -> Any:
    """The answer, which is the same whole and streamed."""
    router = Always(use_sot=True) if use_router else None
    sot = SkeletonOfThought(model, router=router, max_points=3, **options)
    message = await sot.ainvoke(QUESTION)
    assert "".join([chunk.text async for chunk in sot.astream(QUESTION)]) == message.text
    assert await nothing_runs()
    assert model.num_running == 0
    return message


async def test_a_short_plain_answer_is_the_answer() -> None:
    message = await both(local(slow="outline"))
    trace = message.response_metadata["sot"]
    assert (message.text, trace["route"]) == (PLAIN, "plain")
    assert trace["route_reason"] == "the plain answer was whole before the outline"
    assert trace["is_complete"]
    assert trace["introduction"] is None


async def test_a_long_one_is_given_up_when_the_points_begin() -> None:
    message = await both(local(slow="plain"))
    assert message.text == f"{OPENING}\n\n{ANSWER}"
    assert message.response_metadata["sot"]["route"] == "sot"


async def test_one_that_loops_is_no_answer() -> None:
    message = await both(local(plain=LINE * 9, slow="outline"))
    assert message.text == f"{OPENING}\n\n{ANSWER}"


async def test_it_goes_on_if_the_outline_is_none() -> None:
    model = local(outline="I cannot say.", slow="plain")
    message = await both(model)
    assert message.text == PLAIN
    asked = [what(messages) for messages in model.requests]
    assert asked.count("plain") == 2  # once for each way of asking: it is not begun again


@pytest.mark.parametrize("fails_first", [True, False])
async def test_one_that_fails_is_begun_again_only_if_it_is_needed(fails_first: bool) -> None:
    outline = "I cannot say." if fails_first else OUTLINE
    num_failed = []

    def fail(messages: Sequence[BaseMessage]) -> bool:
        is_to_fail = what(messages) == "plain" and not num_failed
        if is_to_fail:
            num_failed.append(1)
        return is_to_fail

    message = await SkeletonOfThought(
        local(outline=outline, slow="outline", fail=fail), router=Always(use_sot=True), max_points=3
    ).ainvoke(QUESTION)
    assert message.text == (PLAIN if fails_first else f"{OPENING}\n\n{ANSWER}")


@pytest.mark.parametrize(
    ("use_router", "options"), [(False, {}), (True, {"conclusion": True})], ids=["no router", "a conclusion"]
)
async def test_it_is_not_begun_where_the_user_wants_points(use_router: bool, options: dict[str, Any]) -> None:
    model = local(slow="outline")
    sot = SkeletonOfThought(
        model, router=Always(use_sot=True) if use_router else None, max_points=3, **options
    )
    await sot.ainvoke(QUESTION)
    assert "plain" not in [what(messages) for messages in model.requests[:3]]
