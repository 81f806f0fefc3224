"""What has been paid for is not lost: policies, retries, deadlines and going on later."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from sot_chains import DeadlineError, ModelProfile, Point, ProviderError, Retries, SkeletonOfThought
from tests.sot_chains.fakes import (
    ANSWER,
    BROKEN,
    BUSY,
    EXPANSIONS,
    PLAIN,
    QUESTION,
    REFUSED,
    FakeProvider,
    nothing_runs,
    sot_of,
)
from tests.sot_chains.router.test_routers import Always

AT_ONCE = Retries(max_attempts=3, first_pause_seconds=0.0)


def sot_over(provider: FakeProvider, **options: Any) -> SkeletonOfThought:
    return sot_of(provider, **{"retries": AT_ONCE, **options})


def second_fails(error: Exception, times: int = 99) -> Any:
    return lambda asked, attempt: error if asked == "Dark room" and attempt < times else None


async def read(sot: SkeletonOfThought, **kwargs: Any) -> tuple[str, dict[str, Any]]:
    chunks = [chunk async for chunk in sot.astream(QUESTION, **kwargs)]
    return "".join(chunk.text for chunk in chunks), chunks[-1].response_metadata["sot"]


# --- policies


async def test_what_breaks_is_tried_again() -> None:
    provider = FakeProvider(fault=lambda asked, attempt: BROKEN if attempt < 2 else None, after_words=1)
    message = await sot_over(provider).ainvoke(QUESTION)
    trace = message.response_metadata["sot"]
    assert message.text == ANSWER
    assert trace["is_complete"]
    assert trace["num_requests"] == sum(provider.asked.values()) == 12
    assert trace["num_calls"] == 4
    assert [point["num_requests"] for point in trace["points"]] == [3, 3, 3]
    assert trace["cost"]["reported"]["input_tokens"] == 40
    assert trace["cost"]["estimated"]["output_tokens"] > 0


async def test_by_default_the_answer_comes_with_what_succeeded() -> None:
    provider = FakeProvider(fault=second_fails(BROKEN))
    message = await sot_over(provider).ainvoke(QUESTION)
    trace = message.response_metadata["sot"]
    assert message.text == (
        "1. **Fixed hours**: Go to bed at the same time.\n\n2. **Dark room**\n\n"
        "3. **Less coffee**: Drink none after noon."
    )
    assert not trace["is_complete"]
    assert trace["failures"] == [
        {"number": 2, "label": "Dark room", "status": "failed", "reason": "ProviderError: the line broke"}
    ]
    assert json.loads(json.dumps(trace)) == trace
    assert provider.asked["Dark room"] == 3
    assert (await read(sot_over(FakeProvider(fault=second_fails(BROKEN)))))[0] == message.text


async def test_what_cannot_succeed_is_not_tried_again() -> None:
    provider = FakeProvider(fault=second_fails(REFUSED))
    trace = (await sot_over(provider).ainvoke(QUESTION)).response_metadata["sot"]
    assert provider.asked["Dark room"] == 1
    assert "no such model" in trace["failures"][0]["reason"]


@pytest.mark.parametrize("reason", ["error", "abort", "network_error", "insufficient_system_resource", "?"])
async def test_a_reply_that_ends_for_an_unknown_reason_has_failed(reason: str) -> None:
    def ending(times: int, **options: Any) -> FakeProvider:
        def ends(asked: str, attempt: int) -> str:
            return reason if asked in ("Dark room", "plain") and attempt < times else "stop"

        return FakeProvider(finish_reason=ends, **options)

    message = await sot_over(ending(1)).ainvoke(QUESTION)
    assert message.text == ANSWER
    assert message.response_metadata["sot"]["num_requests"] == 5
    plain = sot_over(ending(99, answer=lambda messages: PLAIN), router=Always(use_sot=False))
    for sot, number in ((sot_over(ending(99)), 2), (plain, 0)):
        trace = (await sot.ainvoke(QUESTION)).response_metadata["sot"]
        assert not trace["is_complete"]
        assert [failure["number"] for failure in trace["failures"]] == [number]
        assert repr(reason) in trace["failures"][0]["reason"]


@pytest.mark.parametrize("after_words", [0, 1])
async def test_omit(after_words: int) -> None:
    provider = FakeProvider(fault=second_fails(BROKEN), after_words=after_words)
    message = await sot_over(provider, on_failure="omit").ainvoke(QUESTION)
    assert [line[:2] for line in message.text.split("\n\n")] == ["1.", "2."]
    assert message.response_metadata["sot"]["failures"][0]["status"] == "omitted"
    assert provider.asked["Dark room"] == 1


async def test_raise() -> None:
    provider = FakeProvider(fault=second_fails(BROKEN), pause=lambda asked, _: 0.01 * (asked != "Dark room"))
    with pytest.raises(ProviderError, match="the line broke") as caught:
        await sot_over(provider, on_failure="raise").ainvoke(QUESTION)
    assert provider.asked["Dark room"] == 1
    assert caught.value.trace is not None
    assert caught.value.trace["skeleton"] == list(EXPANSIONS)
    assert await nothing_runs()
    assert provider.num_running == 0


async def test_the_trace_of_an_error_calls_nothing_complete_that_is_not() -> None:
    provider = FakeProvider(fault=second_fails(REFUSED, times=1), between=lambda asked: 0.005)
    with pytest.raises(ProviderError) as caught:
        await sot_over(provider, on_failure="raise").ainvoke(QUESTION)
    trace: Any = caught.value.trace
    assert not trace["is_complete"]
    assert "complete" not in [point["status"] for point in trace["points"]]
    assert (await sot_over(provider).ainvoke(QUESTION, resume=trace)).text == ANSWER


@pytest.mark.parametrize("policy", ["plain", "raise"])
async def test_a_deadline_or_timeout_after_a_failure_is_kept(policy: Any) -> None:
    provider = FakeProvider(
        fault=second_fails(REFUSED), pause=lambda asked, _: 5.0 * (asked in ("plain", "Fixed hours"))
    )
    sot = sot_over(provider, on_failure=policy)
    task = asyncio.current_task()
    assert task is not None
    if policy == "plain":
        with pytest.raises(DeadlineError):
            await sot.ainvoke(QUESTION, deadline_seconds=0.5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await sot.ainvoke(QUESTION)
    else:
        with pytest.raises(ProviderError, match="no such model"):
            await sot.ainvoke(QUESTION, deadline_seconds=4.0)
    assert task.cancelling() == 0
    assert await nothing_runs()


async def test_plain() -> None:
    provider = FakeProvider(
        fault=second_fails(BROKEN), pause=lambda asked, _: 0.01 * (asked == "Fixed hours")
    )
    message = await sot_over(provider, on_failure="plain").ainvoke(QUESTION)
    trace = message.response_metadata["sot"]
    assert message.text == PLAIN
    assert trace["route"] == "plain"
    assert "point_2 failed" in trace["route_reason"]
    assert trace["is_complete"]
    # What the abandoned points took is not forgotten.
    assert trace["num_requests"] == sum(provider.asked.values()) == 5
    assert trace["usage"]["total_tokens"] + 15 >= 15 * 3
    assert await nothing_runs()


async def test_plain_after_text_has_been_read_leaves_the_point_out() -> None:
    provider = FakeProvider(fault=second_fails(BROKEN), pause=lambda asked, _: 0.02 * (asked == "Dark room"))
    text, trace = await read(sot_over(provider, on_failure="plain"))
    assert trace["route"] == "sot"
    assert trace["failures"][0]["status"] == "omitted"
    assert text.startswith("1. **Fixed hours**: Go to bed")


async def test_a_function_may_choose() -> None:
    def choose(point: Point, error: Exception) -> Any:
        assert error is BROKEN
        return "omit" if point.number == 2 else "raise"

    message = await sot_over(FakeProvider(fault=second_fails(BROKEN)), on_failure=choose).ainvoke(QUESTION)
    assert "Dark room" not in message.text
    provider = FakeProvider(fault=lambda asked, _: BROKEN if asked == "Less coffee" else None)
    with pytest.raises(ProviderError):
        await sot_over(provider, on_failure=choose).ainvoke(QUESTION)


@pytest.mark.parametrize("policy", ["retry", "omit", "plain", "raise"])
async def test_a_busy_server_is_waited_out_under_every_policy(policy: Any) -> None:
    provider = FakeProvider(fault=second_fails(BUSY, times=2))
    assert (await sot_over(provider, on_failure=policy).ainvoke(QUESTION)).text == ANSWER


async def test_nothing_at_all_is_an_error_that_can_be_gone_on_from() -> None:
    provider = FakeProvider(fault=lambda asked, _: None if asked == "outline" else BROKEN)
    with pytest.raises(ProviderError, match="the line broke") as caught:
        await sot_over(provider).ainvoke(QUESTION)
    provider.fault = lambda asked, _: None
    message = await sot_over(provider).ainvoke(QUESTION, resume=caught.value.trace)
    assert message.text == ANSWER
    assert provider.asked["outline"] == 1


async def test_an_outline_that_cannot_be_had_is_one_error() -> None:
    provider = FakeProvider(fault=lambda asked, _: BROKEN)
    with pytest.raises(ProviderError, match="the line broke") as caught:
        await sot_over(provider).ainvoke(QUESTION)
    assert provider.asked == {"outline": 3}
    assert caught.value.trace is not None
    assert caught.value.trace["num_requests"] == 3


# --- what has been read cannot be taken back


async def test_a_retry_says_nothing_twice() -> None:
    provider = FakeProvider(
        fault=lambda asked, attempt: BROKEN if attempt < 2 and asked != "outline" else None, after_words=2
    )
    text, trace = await read(sot_over(provider))
    assert text == ANSWER
    assert trace["is_complete"]
    stream = sot_over(provider).astream_points(QUESTION)
    provider.asked.clear()
    seen: dict[Any, str] = {}
    async for point, piece in stream:
        seen[point] = seen.get(point, "") + piece
    assert list(seen.values()) == list(EXPANSIONS.values())


async def test_a_retry_that_says_something_else_ends_the_point_where_it_was_read() -> None:
    answers = iter(["Go to bed early.", "Rise at six."])

    def answer(messages: Any) -> str:
        text = str(messages[-1].text)
        return next(answers) if "Your point is 1" in text else FakeProvider().answer(messages)

    def fault(asked: str, attempt: int) -> Exception | None:
        return BROKEN if asked == "Fixed hours" and attempt == 0 else None

    text, trace = await read(sot_over(FakeProvider(fault=fault, after_words=3, answer=answer)))
    assert text.startswith("1. **Fixed hours**: Go to bed\n\n2. **Dark room**: Close")
    assert trace["failures"][0]["status"] == "cut"
    assert "cannot be taken back" in trace["failures"][0]["reason"]
    # Nobody has read anything of an answer that is awaited: the second attempt counts.
    answers = iter(["Go to bed early.", "Rise at six."])
    message = await sot_over(FakeProvider(fault=fault, after_words=3, answer=answer)).ainvoke(QUESTION)
    assert message.text.startswith("1. **Fixed hours**: Rise at six.\n\n")


async def test_a_model_that_continues_replies_goes_on_from_what_was_read() -> None:
    begun: list[str] = []

    def answer(messages: Any) -> str:
        start = str(messages[-1].text)
        if start == "1.":
            return " Fixed hours\n2. Dark room"
        begun.append(start)
        label = "Fixed hours" if "Fixed hours" in start else "Dark room"
        whole = f" {EXPANSIONS[label]}"
        return whole[len(start.partition(":")[2]) :] or whole

    provider = FakeProvider(
        fault=lambda asked, attempt: BROKEN if attempt == 0 and asked == "Fixed hours" else None,
        after_words=5,
        answer=answer,
        supports_prefill=True,
        between=lambda asked: 0.002,  # so that what is written is read
    )
    text, _ = await read(sot_over(provider, profile=ModelProfile(prefill=True)))
    assert text == "1. **Fixed hours**: Go to bed at the same time.\n\n2. **Dark room**: Close the curtains."
    assert any(start.startswith("1. Fixed hours: Go to") for start in begun)


# --- deadlines


async def test_at_the_deadline_what_is_there_is_returned() -> None:
    provider = FakeProvider(between=lambda asked: 10.0 if asked == "Dark room" else 0.0)
    sot = sot_over(provider)
    message = await sot.ainvoke(QUESTION, deadline_seconds=0.1)
    trace = message.response_metadata["sot"]
    assert message.text.replace("2. **Dark room**: Close", "2. **Dark room**: Close the curtains.") == ANSWER
    assert trace["failures"] == [
        {"number": 2, "label": "Dark room", "status": "cut", "reason": "the deadline of 0.1 s passed"}
    ]
    assert trace["points"][1]["estimated"]["input_tokens"] > 0
    assert provider.num_running == 0
    assert await nothing_runs()
    text, trace = await read(sot, deadline_seconds=0.1)
    assert text == message.text
    assert not trace["is_complete"]


async def test_a_deadline_of_one_call() -> None:
    provider = FakeProvider(pause=lambda asked, _: 10.0 * (asked == "Less coffee"))
    bound = sot_over(provider).bind(deadline_seconds=100.0)
    message = await bound.ainvoke(QUESTION, deadline_seconds=0.1)
    assert message.response_metadata["sot"]["failures"][0]["status"] == "failed"
    with pytest.raises(ValueError, match="must be positive, got 0"):
        await sot_over(provider).ainvoke(QUESTION, deadline_seconds=0)


@pytest.mark.parametrize("eager", [False, True])
async def test_a_deadline_before_there_is_anything(eager: bool) -> None:
    provider = FakeProvider(pause=lambda asked, _: 10.0)
    with pytest.raises(DeadlineError, match=r"0\.05 s passed before there was an outline") as caught:
        await sot_over(provider, eager=eager).ainvoke(QUESTION, deadline_seconds=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.trace is not None
    assert caught.value.trace["cost"]["estimated"]["input_tokens"] > 0
    assert await nothing_runs()
    plain = FakeProvider(pause=lambda asked, _: 10.0 * (asked == "plain"), answer=lambda _: PLAIN)
    with pytest.raises(DeadlineError, match="before the model wrote anything"):
        await sot_over(plain, eager=eager).ainvoke(QUESTION, deadline_seconds=0.3)
    assert provider.num_running == plain.num_running == 0


async def test_no_pause_outlasts_the_deadline() -> None:
    provider = FakeProvider(fault=second_fails(BROKEN))
    sot = sot_over(provider, retries=Retries(first_pause_seconds=100.0))
    trace = (await sot.ainvoke(QUESTION, deadline_seconds=5.0)).response_metadata["sot"]
    assert trace["failures"][0]["reason"] == "ProviderError: the line broke"
    assert provider.asked["Dark room"] == 1


async def test_at_the_deadline_calls_end_even_if_nobody_is_reading() -> None:
    provider = FakeProvider(between=lambda asked: 10.0 if asked == "Less coffee" else 0.0)
    async with aclosing(sot_over(provider).astream(QUESTION, deadline_seconds=0.5)) as chunks:
        await anext(chunks)
        await asyncio.sleep(0.8)
        assert provider.num_running == 0
        rest = [chunk async for chunk in chunks]
    assert rest[-1].response_metadata["sot"]["failures"][0]["label"] == "Less coffee"


# --- going on


@pytest.mark.parametrize("streamed", [False, True])
async def test_only_what_is_missing_is_done_again(streamed: bool) -> None:
    provider = FakeProvider(fault=second_fails(BROKEN, times=3))
    sot = sot_over(provider)
    first = (await sot.ainvoke(QUESTION)).response_metadata["sot"]
    assert not first["is_complete"]
    provider.asked.clear()
    provider.fault = lambda asked, attempt: None
    kept = json.loads(json.dumps(first))
    if streamed:
        text, trace = await read(sot, resume=kept)
    else:
        message = await sot.ainvoke(QUESTION, resume=kept)
        text, trace = message.text, message.response_metadata["sot"]
    assert text == ANSWER
    assert provider.asked == {"Dark room": 1}
    assert trace["is_complete"]
    assert [point["is_resumed"] for point in trace["points"]] == [True, False, True]
    assert trace["usage"] == {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
    assert trace["num_requests"] == 1
    again = await sot.ainvoke(QUESTION, resume=trace)  # nothing is missing: nothing is asked
    assert again.text == ANSWER
    assert again.response_metadata["sot"]["num_requests"] == 0


async def test_a_batch_goes_on_one_by_one() -> None:
    provider = FakeProvider(fault=second_fails(BROKEN, times=3))
    sot = sot_over(provider)
    first = (await sot.ainvoke(QUESTION)).response_metadata["sot"]
    provider.asked.clear()
    provider.fault = lambda asked, attempt: None
    both = await sot.abatch([QUESTION, QUESTION], resume=[first, None])
    assert [message.text for message in both] == [ANSWER, ANSWER]
    assert provider.asked == {"Dark room": 2, "outline": 1, "Fixed hours": 1, "Less coffee": 1}
    with pytest.raises(ValueError, match="1 traces for 2 inputs"):
        await sot.abatch([QUESTION, QUESTION], resume=[first])


async def test_something_else_than_a_trace_is_named() -> None:
    with pytest.raises(TypeError, match="resume takes the trace"):
        await sot_over(FakeProvider()).ainvoke(QUESTION, resume="yesterday")


def test_settings_that_make_no_sense() -> None:
    for options, said in (
        ({"on_failure": "ignore"}, "on_failure must be one of"),
        ({"profile": "tiny"}, "profile must be a ModelProfile or one of"),
    ):
        with pytest.raises(ValueError, match=said):
            sot_of(FakeProvider(), **options)  # type: ignore[arg-type]  # the mistakes under test
    with pytest.raises(TypeError, match="deadline_seconds belongs to a call"):
        sot_of(FakeProvider(), deadline_seconds=5.0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Retries(max_attempts=0)
