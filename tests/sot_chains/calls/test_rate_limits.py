"""Limits are never exceeded, are used up, and are waited for in the order of questions."""

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages.ai import UsageMetadata

from benchmarks.limits import Metered, measure_limit, most_in_a_window
from sot_chains import Limits, ProviderError
from sot_chains.calls.rate_limits import Limiter, Window, limiter_for, next_question
from sot_chains.providers.errors import parse_pause
from tests.sot_chains.answering import virtual_time
from tests.sot_chains.fakes import QUESTION, FakeProvider, other_tasks, sot_of

# --- the window of tokens


def num_waiting(limiter: Limiter) -> int:
    """Calls in the queue."""
    return len(limiter._queue) + (limiter._first is not None)


@given(st.lists(st.tuples(st.integers(0, 60), st.floats(0, 20)), max_size=60), st.integers(50, 200))
def test_no_window_ever_holds_more_than_the_limit(requests: list[tuple[int, float]], limit: int) -> None:
    window, now = Window(limit, 10.0), 0.0
    spent: list[tuple[float, int]] = []
    for tokens, pause in requests:
        now += pause
        for _ in range(100):
            if (seconds := window.seconds_until(min(tokens, limit), now)) <= 0:
                break
            now += seconds
        else:
            raise AssertionError("it never let the request through")
        window.spend(min(tokens, limit), now)
        spent.append((now, min(tokens, limit)))
    assert most_in_a_window(spent, 10.0) <= limit


def test_what_was_reserved_is_replaced_by_what_was_used() -> None:
    window = Window(100, 10.0)
    first = window.spend(80, 0.0)
    assert window.seconds_until(30, 1.0) == pytest.approx(9.0)
    window.correct(first, 20)
    assert window.seconds_until(80, 1.0) == 0
    window.correct(first, 120)  # more than estimated: the door is closed until it is old enough
    assert window.seconds_until(1, 1.0) == pytest.approx(9.0)
    assert window.seconds_until(100, 10.5) == 0
    window.correct(first, 5)  # long forgotten
    assert window.seconds_until(100, 10.5) == 0


# --- the limiter, in virtual time


@pytest.mark.parametrize("by_tokens", [False, True])
def test_500_questions(by_tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(
        requests_per_minute=600 if by_tokens else 60,
        tokens_per_minute=12_000 if by_tokens else None,
        window_seconds=6.0,
        key=f"500 questions {by_tokens}",
    )
    measured = virtual_time.run(measure_limit(limits, by_tokens=by_tokens, num_questions=500), monkeypatch)
    assert measured["requests"] == 2000
    assert measured["most_in_a_window"] <= measured["limit"]
    assert measured["share_used"] >= 0.95
    assert measured["largest_displacement"] <= measured["width"]


def test_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = FakeProvider(pause=lambda asked, attempt: 0.1)

    async def work() -> None:
        limits = Limits(max_concurrent=3, key="at once")
        sots = [sot_of(provider, limits=limits) for _ in range(2)]
        await asyncio.gather(*(sot.ainvoke(QUESTION) for sot in sots for _ in range(10)))
        assert not other_tasks()

    virtual_time.run(work(), monkeypatch)
    assert provider.most_running == 3


def test_who_is_cancelled_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        limiter = Limiter(Limits(requests_per_minute=1, window_seconds=10.0))
        limiter.release(await limiter.admit(next_question()), None)
        waiters = [asyncio.create_task(limiter.admit(next_question())) for _ in range(5)]
        await asyncio.sleep(1)
        assert num_waiting(limiter) == 5
        for cancelled in (waiters[0], waiters[2]):  # the first in the queue, and one in the middle
            cancelled.cancel()
        done = await asyncio.gather(*waiters, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in done] == [True, False, True, False, False]
        assert num_waiting(limiter) == 0
        assert limiter.num_running == 3

    virtual_time.run(work(), monkeypatch)


def test_the_points_of_a_question_go_before_later_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> list[str]:
        limiter = Limiter(Limits(requests_per_minute=1, window_seconds=1.0))
        early, late = next_question(), next_question()
        order: list[str] = []

        async def call(question: int, name: str) -> None:
            limiter.release(await limiter.admit(question), None)
            order.append(name)

        calls = [call(early, "outline"), call(late, "later outline"), call(late, "later point")]
        tasks = [asyncio.create_task(one) for one in calls]
        await asyncio.sleep(0.5)
        tasks += [asyncio.create_task(call(early, f"point {number}")) for number in range(3)]
        await asyncio.gather(*tasks)
        return order

    order = virtual_time.run(work(), monkeypatch)
    # Whoever is already first in the queue stays so; the others are overtaken by the earlier question.
    assert order == ["outline", "later outline", "point 0", "point 1", "point 2", "later point"]


def test_what_the_server_says_closes_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        limiter = Limiter(Limits())
        begin = time.monotonic()
        limiter.pause(7.0)
        await limiter.admit(next_question())
        assert time.monotonic() - begin == pytest.approx(7.0, abs=0.1)
        limiter.pause(0.0)
        begin = time.monotonic()
        await limiter.admit(next_question())
        assert time.monotonic() == begin

    virtual_time.run(work(), monkeypatch)


def test_a_pause_that_is_too_long_is_an_error_and_not_a_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        limiter = Limiter(Limits())
        begin = time.monotonic()
        limiter.pause(3600.0)
        with pytest.raises(
            ProviderError, match=r"asked to wait 3600 s, of which 3600 s are left.*now 60"
        ) as failed:
            await limiter.admit(next_question(), longest_wait_seconds=60.0)
        assert failed.value.is_unbilled
        assert failed.value.retry_after_seconds == pytest.approx(3600.0, abs=1.0)
        assert time.monotonic() == begin
        assert not caplog.records
        patient = [asyncio.create_task(limiter.admit(next_question())) for _ in range(3)]
        await asyncio.sleep(100)
        with pytest.raises(ProviderError, match="of which 3500 s are left"):
            await limiter.admit(next_question(), longest_wait_seconds=60.0)
        await asyncio.gather(*patient)
        assert time.monotonic() - begin == pytest.approx(3600.0, abs=1.0)
        assert num_waiting(limiter) == 0

    virtual_time.run(work(), monkeypatch)
    assert [record.message for record in caplog.records] == ["waiting 3600 s: the rate limits of the account"]


def test_a_longer_pause_ends_the_wait_of_those_who_wait_already(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        limiter = Limiter(Limits())
        limiter.pause(30.0)
        waiters = [
            asyncio.create_task(limiter.admit(next_question(), longest_wait_seconds=60.0)) for _ in range(3)
        ]
        await asyncio.sleep(1)
        limiter.pause(3600.0)
        done = await asyncio.gather(*waiters, return_exceptions=True)
        assert all("asked to wait 3600 s" in str(one) for one in done)
        assert (num_waiting(limiter), limiter.num_running) == (0, 0)

    virtual_time.run(work(), monkeypatch)


def test_a_request_that_can_never_be_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        sot = sot_of(Metered(0.0), limits=Limits(tokens_per_minute=60, key="too small"))
        with pytest.raises(ProviderError, match=r"about \d+ tokens can never be sent.*tokens_per_minute=60"):
            await sot.ainvoke("What is there to say?")

    virtual_time.run(work(), monkeypatch)


def test_who_shares_a_limiter() -> None:
    limits = Limits(requests_per_minute=5)
    named = Limits(requests_per_minute=5, key="ours")
    assert limiter_for(limits, "account") is limiter_for(limits, "account")
    assert limiter_for(limits, "account") is limiter_for(None, "account")
    assert limiter_for(limits, "account") is not limiter_for(limits, "other account")
    assert limiter_for(named, "account") is limiter_for(named, "other account")
    assert limiter_for(limits, None) is limiter_for(limits, None)
    assert limiter_for(Limits(), None) is not limiter_for(limits, None)
    assert limiter_for(None, None) is None
    changed = limiter_for(Limits(requests_per_minute=9, key="ours"), None)
    assert changed is limiter_for(named, None) is not None  # one account, whatever numbers it is given


async def test_what_was_sent_counts_after_the_numbers_have_changed() -> None:
    limiter = Limiter(Limits(requests_per_minute=3, tokens_per_minute=100, window_seconds=3600.0))
    for _ in range(3):
        limiter.release(await limiter.admit(next_question(), 30), None)
    limiter.change(Limits(requests_per_minute=4, tokens_per_minute=1000, window_seconds=3600.0))
    limiter.release(await limiter.admit(next_question(), 30), None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(limiter.admit(next_question(), 30), 0.05)
    assert num_waiting(limiter) == 0


@pytest.mark.parametrize(
    "wrong",
    [{"requests_per_minute": 0}, {"tokens_per_minute": -1}, {"max_concurrent": 0}, {"window_seconds": 0}],
)
def test_limits_that_would_wait_forever(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Limits(**wrong)


async def test_threads_share_an_account() -> None:
    """The queue belongs to no event loop: synchronous calls wait in it with asynchronous ones."""
    limits = Limits(max_concurrent=1, key="threads")
    sot = sot_of(FakeProvider(pause=lambda asked, attempt: 0.001), limits=limits)
    answers = await asyncio.gather(
        *(asyncio.to_thread(sot.invoke, QUESTION) for _ in range(4)),
        *(sot.ainvoke(QUESTION) for _ in range(4)),
    )
    assert len({answer.text for answer in answers}) == 1
    limiter = limiter_for(limits, None)
    assert limiter is not None
    assert (num_waiting(limiter), limiter.num_running) == (0, 0)


# --- what servers say


SHORT_OF_REQUESTS = {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "0"}
ANTHROPIC = "anthropic-ratelimit-requests-"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Wed, 01 Jan 2020 00:00:00 GMT"}, 0.0),
        ({"retry-after": ""}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({}, None),
        # All are back in six minutes, one of them in a second.
        ({**SHORT_OF_REQUESTS, "x-ratelimit-reset-requests": "6m0.5s"}, 1.0),
        ({**SHORT_OF_REQUESTS, "retry-after": "9"}, 9.0),
        (
            {**SHORT_OF_REQUESTS, "x-ratelimit-remaining-tokens": "0", "x-ratelimit-limit-tokens": "6000"},
            10.0,
        ),
        ({**SHORT_OF_REQUESTS, "x-ratelimit-remaining-requests": "5"}, None),
        ({f"{ANTHROPIC}limit": "50", f"{ANTHROPIC}remaining": "0"}, 1.2),
        ({f"{ANTHROPIC}remaining": "0"}, None),
    ],
)
def test_how_long_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert parse_pause(headers) == seconds


@given(st.text(max_size=20))
def test_headers_never_crash_us(value: str) -> None:
    names = ("retry-after", "x-ratelimit-limit-requests", "x-ratelimit-reset-requests")
    headers = dict.fromkeys(names, value)
    assert (parse_pause({**headers, "x-ratelimit-remaining-requests": "0"}) or 0.0) >= 0


async def test_usage_is_what_the_window_holds_in_the_end() -> None:
    usage = UsageMetadata(input_tokens=1, output_tokens=1, total_tokens=2)
    limits = Limits(tokens_per_minute=100_000, key="frugal")
    await sot_of(FakeProvider(usage=usage), limits=limits).ainvoke(QUESTION)
    limiter = limiter_for(limits, None)
    assert limiter is not None
    rest = 100_000 - 4 * 2
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(limiter.admit(next_question(), rest + 1), 0.05)
    await asyncio.wait_for(limiter.admit(next_question(), rest), 0.05)
