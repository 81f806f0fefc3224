"""Requests, input tokens and output tokens are limits of their own, at a server that has all three."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.limits import measure_vendor, use_of
from benchmarks.paced_server import paced_server
from benchmarks.vendor_account import ANTHROPIC, OPENAI, RateLimits, Terms
from sot_chains import Limits, PromptCaching, SkeletonOfThought, close_clients
from sot_chains.calls import rate_limits
from sot_chains.calls.rate_limits import Limiter, limiter_for, next_question
from sot_chains.providers import Delta
from tests.sot_chains.answering import virtual_time

_NAMES = ("requests", "input_tokens", "output_tokens")


async def _send_all(
    limits: Mapping[str, int], window_seconds: float, num_calls: int, longest_way_seconds: float
) -> tuple[int, list[tuple[float, dict[str, int]]]]:
    """Sends calls to a server that counts each when it arrives, which is later for those sent first.

    Returns how many were refused, and what was counted when.
    """
    draw, loop = random.Random(0), asyncio.get_running_loop()
    limiter = Limiter(
        Limits(window_seconds=window_seconds, **{f"{name}_per_minute": one for name, one in limits.items()})
    )
    server = RateLimits(window_seconds=window_seconds, **limits)
    counted: list[tuple[float, dict[str, int]]] = []
    num_refused = num_sent = 0
    longest = 150.0  # of the replies by now

    def count(**amounts: int) -> None:
        server.spend(loop.time(), **amounts)
        counted.append((loop.time(), amounts))

    async def call() -> None:
        nonlocal num_refused, num_sent, longest
        num_in, num_out = draw.randint(450, 550), draw.randint(80, 120)
        reserved = await limiter.admit(next_question(), num_in, lambda: (round(longest), round(longest)))
        num_sent += 1
        way_seconds = longest_way_seconds * 0.98**num_sent
        await asyncio.sleep(way_seconds)
        if server.refused(loop.time(), num_in):
            num_refused += 1
        count(requests=1, input_tokens=num_in)
        await asyncio.sleep(0.01 * window_seconds * draw.uniform(1, 2))
        limiter.note(Delta(), reserved)
        for _ in range(0, num_out, 10):
            await asyncio.sleep(0.002 * window_seconds)
            count(output_tokens=10)
            limiter.note(Delta("word" * 8), reserved)  # by which the estimate is wrong
        longest = max(num_out, 0.99 * longest)
        limiter.release(reserved, (num_in, -(-num_out // 10) * 10))

    await asyncio.gather(*(call() for _ in range(num_calls)))
    return num_refused, counted


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(50, 100) | st.none(), min_size=3, max_size=3).filter(any),
    st.sampled_from([6.0, 60.0]),
    st.floats(0.0, 0.4),
)
def test_any_mix_of_limits_is_kept_and_used_up(
    calls_per_window: list[int | None], window_seconds: float, way: float
) -> None:
    sizes = dict(zip(_NAMES, (1, 500, 100), strict=True))
    limits = {n: sizes[n] * many for n, many in zip(_NAMES, calls_per_window, strict=True) if many}
    work = _send_all(limits, window_seconds, 300, way * window_seconds)
    num_refused, counted = virtual_time.run(work, pytest.MonkeyPatch())
    assert num_refused == 0
    uses = [use_of(name, limit, counted, window_seconds) for name, limit in limits.items()]
    assert max(use["most_in_a_window"] for use in uses) <= 1.02  # replies may be longer than expected
    if way < 0.02:  # what arrives late counts from then on
        assert max(use["share_used"] for use in uses) >= 0.93


async def test_cached_reads_let_more_through() -> None:
    limits = {"requests": 100, "input_tokens": 5_000, "output_tokens": 10_000}
    cached = await measure_vendor(limits, num_questions=4, window_seconds=0.8)
    uncached = await measure_vendor(limits, num_questions=4, window_seconds=0.8, caching="off")
    assert cached["num_complete"] == uncached["num_complete"] == 4
    assert cached["input_tokens"]["counted"] < 5_000 < uncached["input_tokens"]["counted"]


@pytest.mark.parametrize("scarce", [*_NAMES, "tokens"])
@pytest.mark.parametrize(
    ("model", "terms"), [("openai:gpt-5.6", OPENAI), ("anthropic:claude-sonnet-5", ANTHROPIC)]
)
async def test_headers_tell_what_others_use(model: str, terms: Terms, scarce: str) -> None:
    """Somebody else has used most of a limit: after one answer the chain knows, and sends what is left."""
    room = {"requests": 12, "input_tokens": 1500, "output_tokens": 250, "tokens": 1500}
    sizes = {"requests": 1000, "input_tokens": 100_000, "output_tokens": 40_000, "tokens": 100_000}
    names = ["tokens"] if scarce == "tokens" else _NAMES
    pace: dict[str, Any] = {f"{name}_per_window": sizes[name] for name in names}
    pace |= {"first_token_seconds": 0.01, "tokens_per_second": 2000.0, "num_points": 3, "point_tokens": 8}
    with paced_server(terms=terms, window_seconds=1.0, **pace) as server:
        bounds: dict[str, Any] = {f"{name}_per_minute": sizes[name] for name in names}
        chain = SkeletonOfThought(
            model,
            base_url=server.url,
            api_key="none",
            router="always",
            caching=PromptCaching("off"),
            limits=Limits(window_seconds=1.0, **bounds),
        )
        server.count(**{scarce: sizes[scarce] - room[scarce]})
        await chain.ainvoke("What does it say?")
        answers = await asyncio.gather(*(chain.ainvoke(f"What does {n} say?") for n in range(12)))
        await close_clients()
        assert all(answer.response_metadata["sot"]["is_complete"] for answer in answers)
        assert server.num_refused == 0


def test_waits_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    virtual_time.run(_send_all({"requests": 50}, 60.0, 150, 0.0), monkeypatch)
    assert 1 <= len(caplog.records) <= 3


def test_a_limiter_lives_as_long_as_it_restricts_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        limits = Limits(requests_per_minute=1, key="passing")
        limiter = limiter_for(limits, None)
        assert limiter is not None
        limiter.release(await limiter.admit(next_question()), None)
        number = id(limiter)
        del limiter
        limiter_for(Limits(key="another"), None)
        gc.collect()
        assert id(rate_limits._limiters["passing"]) == number  # its window is not over
        await asyncio.sleep(1000)
        limiter_for(Limits(key="another"), None)
        gc.collect()
        assert "passing" not in rate_limits._limiters

    virtual_time.run(work(), monkeypatch)
