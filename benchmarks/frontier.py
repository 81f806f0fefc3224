"""Price against latency: what each Skeleton-of-Thought setting costs and saves on a paced server.

One question at a time is sent over HTTP on loopback; the settings alternate and the medians are reported.
The server streams at the pace of a hosted model, caches prompts as its vendor does and bills for them, so
seconds and prices are those of real fan-out; the texts are filler. ``eager_speedup`` compares the paper's
schedule with points that start early; ``vendors`` compares plain answers, fast tiers and Skeleton-of-Thought
with and without marks for the cache, at a prompt of some thousand tokens and eight points.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from langchain_core.messages import HumanMessage
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.paced_server import PacedServer, paced_server
from benchmarks.results import save
from benchmarks.vendor_account import ANTHROPIC, OPENAI, total
from sot_chains import Limits, Price, PromptCaching, Prompts, SkeletonOfThought, close_clients
from sot_chains.calls.usage import Tokens
from sot_chains.prompts.profile import ENGLISH, ModelProfile

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


_FAST = Price(2.0, 10.0, cached_input=0.2, cache_write=2.5, cache_write_1h=4.0)
VENDOR_PRICE = Price(1.0, 5.0, cached_input=0.1, cache_write=1.25, cache_write_1h=2.0, tiers={"fast": _FAST})
VENDORS = {
    "openai": ("openai:gpt-5.6-sol", OPENAI, {"service_tier": "fast"}),
    "anthropic": ("anthropic:claude-opus-5-5", replace(ANTHROPIC, least_tokens=512), {"speed": "fast"}),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"router": "never"},
    "plain, fast tier": {"router": "never", "is_fast": True},
    "points, no marks": {"caching": PromptCaching("off")},
    "points, prompt marked": {"caching": PromptCaching("shared")},
    "points, outline marked too": {},
    "points, eager": {"eager": True},
    "points, fast tier": {"is_fast": True},
}


def documents(num_tokens: int) -> str:
    """A question behind documents of so many tokens."""
    text = " ".join(f"Sentence {number} of the documents says this." for number in range(num_tokens))
    return text[: num_tokens * 4 - len(_QUESTION) - 1] + "\n" + _QUESTION


async def measure_form(vendor: str, form: str, *, num_tokens: int, **pace: Any) -> dict[str, float]:
    """Seconds and price of one answer in a form, and what was paid for its input, in prompts."""
    model, terms, fast = VENDORS[vendor]
    settings = {"router": "always", "prices": VENDOR_PRICE, **FORMS[form]}
    settings |= fast if settings.pop("is_fast", False) else {}
    with paced_server(terms=terms, **{"num_points": 8, "point_tokens": 80, **pace}) as server:
        sot = SkeletonOfThought(model, base_url=server.url, api_key="none", **settings)
        begin, first, told = time.perf_counter(), None, 0.0
        async for chunk in sot.astream(documents(num_tokens)):
            if chunk.text and first is None:
                first = time.perf_counter() - begin
            told = chunk.response_metadata["sot"]["cost"]["price"] if chunk.response_metadata else told
        seconds = time.perf_counter() - begin
        await close_clients()
        price = sum(VENDOR_PRICE.of(cast("Tokens", total([one])), one.tier) for one in server.charges)
        prompts = sum(charge.input_cost() for charge in server.charges) / num_tokens
    assert abs(price - told) < 1e-9, (price, told)
    return {"seconds": seconds, "first_text_seconds": first or seconds, "prompts": prompts, "price": price}


async def vendors(
    repeats: int = 3, num_tokens: int = 6000, names: Sequence[str] = tuple(VENDORS), **pace: Any
) -> dict[str, dict[str, dict[str, float]]]:
    """Every form at every vendor: medians, and the price over that of the plain answer."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for vendor in names:
        runs: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
        for form in list(FORMS) * repeats:
            runs[form].append(await measure_form(vendor, form, num_tokens=num_tokens, **pace))
        rows = {
            form: {key: statistics.median(run[key] for run in of_one) for key in of_one[0]}
            for form, of_one in runs.items()
        }
        for row in rows.values():
            row["over_plain"] = row["price"] / rows["plain"]["price"]
        figures[vendor] = {
            form: {key: round(one, 6) for key, one in row.items()} for form, row in rows.items()
        }
    return figures


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
    by_vendor = asyncio.run(vendors(options.repeats, first_token_seconds=0.5, tokens_per_second=80.0))
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
    for vendor, rows in by_vendor.items():
        table = Table(vendor, "seconds", "first text", "prompts paid", "price over plain")
        for form, row in rows.items():
            times = f"{row['seconds']:.2f}", f"{row['first_text_seconds']:.2f}"
            table.add_row(form, *times, f"{row['prompts']:.2f}", f"{row['over_plain']:.2f}x")
        console.print(table)
    summary = {"settings": settings, "eager_speedup": eager_speedup, "vendors": by_vendor}
    if options.save:
        save("frontier", summary, [])
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
