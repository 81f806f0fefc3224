"""Requests, input tokens and output tokens are limits of their own, at a server that has all three."""

from __future__ import annotations

from benchmarks.limits import measure_vendor


async def test_cached_reads_let_more_through() -> None:
    limits = {"requests": 100, "input_tokens": 7_000, "output_tokens": 10_000}
    cached = await measure_vendor(limits, num_questions=6, window_seconds=1.5)
    uncached = await measure_vendor(limits, num_questions=6, window_seconds=1.5, caching="off")
    assert cached["num_complete"] == uncached["num_complete"] == 6
    assert cached["windows"] < 1.0 < uncached["windows"]


async def test_output_tokens_are_a_limit_of_their_own() -> None:
    limits = {"requests": 100, "input_tokens": 100_000, "output_tokens": 400}
    figures = await measure_vendor(limits, num_questions=6, window_seconds=1.0)
    assert figures["num_complete"] == 6
    assert figures["windows"] > 0.5
