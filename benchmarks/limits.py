"""Checks that rate limits are respected and used up, and that waiting behind one is cheap.

200 questions run at once, each with an outline and three points, under 120 requests per window of two
seconds, then under a token limit that binds first. Three figures are measured where a request would be sent:
the most that started in any sliding window, the share of the limit used from the first request to the last,
and how far the order of completion is from the order of arrival. Then 2,000 calls wait behind a limit while
nothing else runs, and the share of a core they take is measured. At last 200 questions are sent to a server
that has limits of requests, input tokens and output tokens and refuses what passes one, three times, with
another limit binding; the server tells what it has counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from langchain_core.messages import BaseMessage
from langchain_core.messages.ai import UsageMetadata
from rich.console import Console
from rich.table import Table

from benchmarks.paced_server import paced_server
from benchmarks.results import save
from benchmarks.vendor_account import ANTHROPIC
from sot_chains import Limits, PromptCaching, SkeletonOfThought, close_clients
from sot_chains.calls.rate_limits import Limiter, next_question
from sot_chains.calls.usage import num_message_tokens
from sot_chains.providers import Delta, VendorProvider

_OUTLINE = "1. First point\n2. Second point\n3. Third point"
_WIDTH = 4  # calls per question
_MAX_TOKENS = 50
_THREE_LIMITS = {  # by which of them binds
    "requests": {"requests": 170, "input_tokens": 400_000, "output_tokens": 80_000},
    "input tokens": {"requests": 1000, "input_tokens": 26_000, "output_tokens": 20_000},
    "output tokens": {"requests": 1000, "input_tokens": 400_000, "output_tokens": 3_500},
}


class Metered(VendorProvider):
    """A provider that records when each request starts and how many tokens were reserved for it."""

    vendor = "metered"

    def __init__(self, seconds: float) -> None:
        super().__init__("metered", base_url="http://metered", api_key=None, prefill=False)
        self._seconds = seconds
        self.starts: list[tuple[float, int]] = []

    async def _deltas(
        self, messages: Sequence[BaseMessage], parameters: dict[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        num_in = num_message_tokens(messages)
        self.starts.append((time.monotonic(), num_in + _MAX_TOKENS))
        await asyncio.sleep(self._seconds)
        text = str(messages[-1].content).lower()
        reply = _OUTLINE if "outline" in text and "point is" not in text else "So it is."
        usage = UsageMetadata(
            input_tokens=num_in, output_tokens=_MAX_TOKENS, total_tokens=num_in + _MAX_TOKENS
        )
        yield Delta(reply, usage, "stop")


def most_in_a_window(starts: Sequence[tuple[float, int]], window_seconds: float) -> int:
    """The largest sum of weights in any window."""
    most = total = first = 0
    for moment, weight in starts:
        total += weight
        while moment - starts[first][0] >= window_seconds:
            total -= starts[first][1]
            first += 1
        most = max(most, total)
    return most


async def measure_limit(limits: Limits, *, by_tokens: bool, num_questions: int) -> dict[str, Any]:
    """How well ``num_questions`` concurrent questions respect and use up a limit."""
    provider = Metered(0.02)
    sot = SkeletonOfThought(provider, limits=limits, router="always")
    finished: list[int] = []

    async def answer(number: int) -> None:
        await sot.ainvoke(f"Question {number}: what is there to say?", max_tokens=_MAX_TOKENS)
        finished.append(number)

    await asyncio.gather(*(answer(number) for number in range(num_questions)))
    starts = provider.starts if by_tokens else [(moment, 1) for moment, _ in provider.starts]
    limit = limits.tokens_per_minute if by_tokens else limits.requests_per_minute
    assert limit is not None
    seconds = starts[-1][0] - starts[0][0]
    # The last request opens a window that is not used up, so only what started before it counts.
    num_windows = seconds / limits.window_seconds
    before_last = sum(weight for moment, weight in starts if moment < starts[-1][0])
    return {
        "limit": limit,
        "most_in_a_window": most_in_a_window(starts, limits.window_seconds),
        "share_used": round(before_last / (limit * (num_windows if num_windows >= 1 else 1)), 4),
        "requests": len(starts),
        "seconds": round(seconds, 2),
        "largest_displacement": max(abs(place - number) for place, number in enumerate(finished)),
        "width": _WIDTH,
    }


async def measure_vendor(
    limits: Mapping[str, int],
    *,
    num_questions: int,
    window_seconds: float,
    caching: Literal["auto", "off"] = "auto",
) -> dict[str, Any]:
    """How ``num_questions`` at once keep to and use up the limits of a server that has three.

    ``limits`` are ``requests``, ``input_tokens`` and ``output_tokens`` in a window. Each question stands
    behind documents of its own, some 700 tokens that the points read from the cache.
    """
    pace: dict[str, Any] = {f"{name}_per_window": limit for name, limit in limits.items()}
    terms = replace(ANTHROPIC, least_tokens=512)
    with paced_server(
        terms=terms, num_points=3, point_tokens=20, first_token_seconds=0.1, tokens_per_second=200.0,
        window_seconds=window_seconds, **pace,
    ) as server:  # fmt: skip
        key = f"three limits {time.monotonic()}"
        bounds: dict[str, Any] = {f"{name}_per_minute": limit for name, limit in limits.items()}
        sot = SkeletonOfThought(
            "anthropic:claude-opus-5",
            base_url=server.url,
            api_key="none",
            router="always",
            limits=Limits(window_seconds=window_seconds, key=key, **bounds),
            caching=PromptCaching(caching),
        )
        numbers = range(num_questions)
        texts = [" ".join(f"word {place} of document {number}" for place in range(110)) for number in numbers]
        answers = await asyncio.gather(*(sot.ainvoke(f"{text}\nWhat does it say?") for text in texts))
        await close_clients()
    return {
        "num_refused": server.num_refused,
        "num_complete": sum(one.response_metadata["sot"]["is_complete"] for one in answers),
        **{name: use_of(name, limit, server.counted, window_seconds) for name, limit in limits.items()},
    }


def use_of(
    name: str, limit: int, counted: Sequence[tuple[float, Mapping[str, int]]], window_seconds: float
) -> dict[str, float]:
    """How a limit was used, up to where the last request began.

    ``share_used`` is of what could have been sent: the whole of the limit at the beginning of each window.
    """
    begins = [moment for moment, amounts in counted if "requests" in amounts]
    windows = (begins[-1] - begins[0]) / window_seconds
    starts = [(moment, amounts.get(name, 0)) for moment, amounts in counted]
    whole = sum(number for moment, number in starts if moment < begins[0] + int(windows) * window_seconds)
    return {
        "counted": sum(number for _, number in starts),
        "windows": round(windows, 2),
        "share_used": round(whole / limit / max(int(windows), 1), 3),
        "most_in_a_window": round(most_in_a_window(starts, window_seconds) / limit, 3),
    }


async def measure_waiting(num_waiters: int, seconds: float) -> dict[str, Any]:
    """The share of a core that calls take while they wait behind a limit."""
    limiter = Limiter(Limits(requests_per_minute=1, window_seconds=3600.0))
    await limiter.admit(next_question())
    waiters = [asyncio.create_task(limiter.admit(next_question())) for _ in range(num_waiters)]
    await asyncio.sleep(0.5)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    share = (time.process_time() - cpu_begin) / (time.perf_counter() - begin)
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    return {"waiters": num_waiters, "cpu_share": round(share, 4)}


async def measure(num_questions: int) -> dict[str, Any]:
    """Run all measurements."""
    requests = Limits(requests_per_minute=120, window_seconds=2.0, key="requests")
    tokens = Limits(requests_per_minute=600, tokens_per_minute=24_000, window_seconds=2.0, key="tokens")
    return {
        "requests": await measure_limit(requests, by_tokens=False, num_questions=num_questions),
        "tokens": await measure_limit(tokens, by_tokens=True, num_questions=num_questions),
        "waiting": await measure_waiting(2000, 5.0),
        **{
            f"three limits, {name}": await measure_vendor(bounds, num_questions=200, window_seconds=6.0)
            for name, bounds in _THREE_LIMITS.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    summary = asyncio.run(measure(options.questions))
    table = Table("", "limit", "most in a window", "share used", "largest displacement", "width")
    for name in ("requests", "tokens"):
        row = summary[name]
        names = ("limit", "most_in_a_window", "share_used", "largest_displacement", "width")
        table.add_row(name, *(str(row[column]) for column in names))
    console = Console(width=100)
    console.print(table)
    waiting = summary["waiting"]
    console.print(f"{waiting['waiters']} waiting calls take {waiting['cpu_share']:.2%} of a core")
    for name, row in summary.items():
        if name.startswith("three"):
            console.print(name, row)
    if options.save:
        save("limits", summary, [])
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
