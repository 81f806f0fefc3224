"""Price against latency: what each Skeleton-of-Thought setting costs and saves on a paced server.

One question at a time is sent over HTTP on loopback; the settings alternate and the medians are reported.
The server streams at the pace of a hosted model and counts tokens, so seconds and prices are those of real
fan-out; the texts are filler. ``eager_speedup`` compares the paper's schedule with points that start early.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from langchain_core.messages import HumanMessage
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.paced_server import PacedServer, paced_server
from benchmarks.results import save
from sot_chains import Limits, Price, Prompts, SkeletonOfThought, close_clients
from sot_chains.prompts.profile import ModelProfile
from sot_chains.prompts.templates import ENGLISH

_QUESTION = "How do I get more done in a day?"
PRICE = Price(input=0.4, output=1.6)
# The requests that small models get, without the examples.
_LONG = ModelProfile(prompts=Prompts({"en": replace(ENGLISH, examples=())}))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain answer": {},
    "paper's schedule": {},
    "eager": {"eager": True},
    "short prompts": {"profile": ModelProfile.STRONG},
    "short prompts, eager": {"profile": ModelProfile.STRONG, "eager": True},
    "at most 3 points": {"max_points": 3},
}


async def measure_one(server: PacedServer, name: str, **options: Any) -> dict[str, float]:
    """Seconds, price and tokens of one answer under the setting ``name``."""
    before = server.input_tokens, server.output_tokens
    settings = {"profile": _LONG, "prices": PRICE, "router": "always", **SETTINGS[name], **options}
    sot = SkeletonOfThought("openai:paced", base_url=server.url, **settings)
    begin = time.perf_counter()
    if name == "plain answer":
        first = None
        async for delta in sot.provider.stream([HumanMessage(_QUESTION)], config={}):
            if delta.text and first is None:
                first = time.perf_counter() - begin
    else:
        first = None
        async for chunk in sot.astream(_QUESTION):
            if chunk.text and first is None:
                first = time.perf_counter() - begin
    seconds = time.perf_counter() - begin
    num_in, num_out = server.input_tokens - before[0], server.output_tokens - before[1]
    return {
        "seconds": seconds,
        "first_text_seconds": first or seconds,
        "input_tokens": num_in,
        "output_tokens": num_out,
        "price": (num_in * PRICE.input + num_out * PRICE.output) / 1e6,
    }


async def measure(
    names: Sequence[str], *, repeats: int, server: PacedServer, **options: Any
) -> dict[str, dict[str, float]]:
    """Median figures of each setting."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    await measure_one(server, names[0], **options)  # warm-up: connections and imports
    for repeat in track(range(repeats), "Measuring", console=Console(stderr=True)):
        for place in range(len(names)):
            name = names[(place + repeat) % len(names)]
            runs[name].append(await measure_one(server, name, **options))
    await close_clients()
    return {
        name: {key: round(statistics.median(run[key] for run in of_one), 7) for key in of_one[0]}
        for name, of_one in runs.items()
    }


async def measure_eager(*, repeats: int) -> dict[str, float]:
    """How many times sooner the last token arrives when points start before the outline ends.

    The outline takes a third of the plain schedule's time in each case. If all points are equally long and
    run at once, the last point starts when the outline ends and determines the total, so only the first text
    comes sooner. The total shrinks if earlier points are longer, or if concurrent calls are limited, because
    early points then leave room for the others.
    """
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "equal points": ({"point_tokens": 48}, {}),
        "longest first": ({"point_tokens": [48, 40, 32, 24, 20, 16]}, {}),
        "four at once": ({"point_tokens": 24}, {"limits": Limits(max_concurrent=4, key="four at once")}),
    }
    speedups = {}
    for case, (pace, options) in cases.items():
        with paced_server(first_token_seconds=0.02, tokens_per_second=40.0, **pace) as server:
            rows = await measure(["paper's schedule", "eager"], repeats=repeats, server=server, **options)
        speedups[case] = round(rows["paper's schedule"]["seconds"] / rows["eager"]["seconds"], 3)
    return speedups


async def frontier(repeats: int = 3, **pace: Any) -> dict[str, dict[str, float]]:
    """Seconds and price of every setting, against a server with the given pace."""
    with paced_server(**pace) as server:
        return await measure(list(SETTINGS), repeats=repeats, server=server)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frontier", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the median is reported")
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    settings = asyncio.run(frontier(options.repeats))
    eager_speedup = asyncio.run(measure_eager(repeats=options.repeats))
    plain = settings["plain answer"]
    table = Table("", "seconds", "first text", "tokens in", "tokens out", "price per 1000", "over plain")
    for name, row in settings.items():
        table.add_row(
            name,
            f"{row['seconds']:.2f}",
            f"{row['first_text_seconds']:.2f}",
            f"{row['input_tokens']:.0f}",
            f"{row['output_tokens']:.0f}",
            f"{row['price'] * 1000:.3f}",
            f"{row['price'] / plain['price']:.2f}x",
        )
    console = Console(width=110)
    console.print(table)
    for case, speedup in eager_speedup.items():
        console.print(f"eager, {case}: last token {speedup:.2f} times sooner")
    summary = {"settings": settings, "eager_speedup": eager_speedup}
    if options.save:
        save("frontier", summary, [])
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
