"""Where Skeleton-of-Thought stops paying off: seconds per answer as the arrival rate rises.

Questions arrive at random (Poisson) at rising rates, the same ones at the same moments for every method:
plain, always Skeleton-of-Thought, and by the shipped router (SoT-R). There are two services: one engine with
a local model, where more rows slow down every forward, and an API that streams at a fixed pace but limits the
requests in a window. Seconds run from a question's arrival to the end of its answer, waiting included. The
API is simulated in this process; the limiter before it is the shipped one.

With ``--at-once`` so many questions are asked at the same moment instead, see :mod:`benchmarks.load_at_once`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.load_at_once import questions_of, report_at_once
from benchmarks.results import RESULTS, save
from benchmarks.workloads import add_model_argument
from local_backend import ChatLocal
from sot_chains import Delta, Limits, SkeletonOfThought
from sot_chains.router import TrainedRouter

WAYS = ("plain", "sot", "sot_r")
_NAMES = {"plain": "plain", "sot": "SoT always", "sot_r": "SoT-R"}
_PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class Service:
    """A service that answers questions.

    Attributes:
        name: Name in the table.
        chains: One for each method.
        rates: Questions per second.
        reset: Called before each run, so that no run profits from the one before.
    """

    name: str
    chains: dict[str, SkeletonOfThought]
    rates: Sequence[float]
    reset: Callable[[], None]


class PacedProvider:
    """An API that answers at a fixed pace: an outline, a point or a whole answer of typical length.

    The lengths are realistic; the words do not matter.
    """

    supports_prefill = False
    model_name = "paced"

    def __init__(self, seconds_per_token: float, first_token_seconds: float) -> None:
        self._seconds_per_token = seconds_per_token
        self._first_token_seconds = first_token_seconds

    async def stream(
        self, messages: Sequence[BaseMessage], *, config: RunnableConfig, **kwargs: Any
    ) -> AsyncIterator[Delta]:
        """Streams chunks of ten tokens, because the event loop's clock is too coarse for single ones."""
        request = str(messages[-1].text)
        draw = random.Random(request)  # the same request, the same reply
        if "outline" in request.lower() and "point is" not in request:
            text = "\n".join(f"{number}. Point number {number}" for number in range(1, draw.randint(6, 9)))
        elif "point is" in request:
            text = " ".join(["word"] * draw.randint(30, 60))
        else:
            text = " ".join(["word"] * draw.randint(220, 420))
        words = text.split(" ")
        await asyncio.sleep(self._first_token_seconds)
        for start in range(0, len(words), 10):
            part = words[start : start + 10]
            await asyncio.sleep(self._seconds_per_token * len(part))
            yield Delta(" ".join(part) + " ")


def engine_service(chat: ChatLocal, rates: Sequence[float]) -> Service:
    """A local model on one engine."""
    chains = {
        "plain": SkeletonOfThought(chat, router="never"),
        "sot": SkeletonOfThought(chat, router="always"),
        "sot_r": SkeletonOfThought(chat, router=TrainedRouter()),
    }
    return Service("engine", chains, rates, chat.engine.forget_prefixes)


def api_service(rates: Sequence[float], *, requests_per_window: int, window_seconds: float) -> Service:
    """The paced API; every method has its own account, so that none uses up another's limit."""
    provider = PacedProvider(seconds_per_token=0.002, first_token_seconds=0.05)
    routers: dict[str, Any] = {"plain": "never", "sot": "always", "sot_r": TrainedRouter()}
    chains = {
        way: SkeletonOfThought(
            provider,
            limits=Limits(
                requests_per_minute=requests_per_window,
                window_seconds=window_seconds,
                key=f"benchmarks.load, {way}",
            ),
            router=router,
        )
        for way, router in routers.items()
    }
    # Requests of the last window would count in the next run, so wait until it is over.
    return Service("paced API", chains, rates, lambda: time.sleep(window_seconds))


async def run(
    chain: SkeletonOfThought, questions: Sequence[str], rate: float, *, seed: int
) -> dict[str, Any]:
    """Send ``questions`` at ``rate`` per second; returns latency, throughput and the share of SoT."""
    draw = random.Random(seed)
    begin = time.perf_counter()
    seconds: list[float] = []
    routes: list[str] = []

    async def ask(question: str) -> None:
        arrived = time.perf_counter()
        message = await chain.ainvoke(question)
        seconds.append(time.perf_counter() - arrived)
        routes.append(message.response_metadata["sot"]["route"])

    async with asyncio.timeout(_PATIENCE_SECONDS), asyncio.TaskGroup() as group:
        due = begin
        for question in questions:
            due += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(ask(question))
    ordered = sorted(seconds)
    return {
        "median_seconds": statistics.median(ordered),
        "p95_seconds": ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))],
        "answers_per_second": len(ordered) / (time.perf_counter() - begin),
        "share_of_sot": routes.count("sot") / len(routes),
    }


def measure(service: Service, questions: Sequence[str], *, repeats: int) -> list[dict[str, Any]]:
    """Run every method at every rate, alternating; each figure is the median of ``repeats`` runs."""
    cases = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(service.name, total=len(service.rates) * len(WAYS) * repeats)
        for rate in service.rates:
            runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for repeat in range(repeats):
                # Rotate which method goes first; arrivals differ between repeats, not between methods.
                for way in WAYS[repeat % len(WAYS) :] + WAYS[: repeat % len(WAYS)]:
                    service.reset()
                    runs[way].append(asyncio.run(run(service.chains[way], questions, rate, seed=repeat)))
                    progress.advance(task)
            cases += [
                {
                    "service": service.name,
                    "rate": rate,
                    "way": way,
                    **{
                        key: round(statistics.median(one[key] for one in runs[way]), 4)
                        for key in runs[way][0]
                    },
                }
                for way in WAYS
            ]
    return cases


def summary(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By service: the speed-up at each rate, and the rate from which plain is faster."""
    found: dict[str, Any] = {}
    for service in dict.fromkeys(case["service"] for case in cases):
        by_rate: dict[float, dict[str, float]] = {}
        for case in cases:
            if case["service"] == service:
                by_rate.setdefault(case["rate"], {})[case["way"]] = case["median_seconds"]
        found[service] = {
            "speed_up_by_rate": {
                str(rate): round(medians["plain"] / medians["sot"], 3) for rate, medians in by_rate.items()
            },
            "plain_is_sooner_from_rate": next(
                (rate for rate, medians in by_rate.items() if medians["plain"] < medians["sot"]), None
            ),
        }
    return found


def picture(cases: Sequence[dict[str, Any]]) -> Any:
    """A matplotlib figure of seconds and throughput against rate, with one row per service."""
    from matplotlib.figure import Figure

    services = list(dict.fromkeys(case["service"] for case in cases))
    kinds = (
        ("median_seconds", "median, s"),
        ("p95_seconds", "95th percentile, s"),
        ("answers_per_second", "answers a second"),
    )
    figure = Figure(figsize=(12, 3.4 * len(services)), layout="constrained")
    axes = figure.subplots(len(services), len(kinds), squeeze=False)
    for row, service in zip(axes, services, strict=True):
        for axis, (key, title) in zip(row, kinds, strict=True):
            for way in WAYS:
                line = [case for case in cases if case["service"] == service and case["way"] == way]
                axis.plot([c["rate"] for c in line], [c[key] for c in line], "o-", label=_NAMES[way])
            axis.set(title=f"{service}: {title}", xlabel="questions a second", xscale="log")
            if key != "answers_per_second":
                axis.set_yscale("log")
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    add_model_argument(parser)
    parser.add_argument("--max-tokens", type=int, default=128, help="maximum tokens of a reply (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="number format of the model (%(default)s)")
    parser.add_argument("--service", choices=("engine", "api", "both"), default="both")
    parser.add_argument("--questions", type=int, default=24, help="questions per run (24)")
    parser.add_argument("--repeats", type=int, default=3, help="runs to take the median of (3)")
    parser.add_argument("--engine-rates", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--api-rates", type=float, nargs="+", default=[0.5, 1, 2, 4, 8, 16])
    parser.add_argument("--picture", type=Path, help="output file of the picture, .png or .svg")
    parser.add_argument(
        "--save", action="store_true", help="keep result and picture under benchmarks/results"
    )
    about = "ask so many questions at the same moment instead"
    parser.add_argument("--at-once", type=int, nargs="+", metavar="N", help=about)
    options = parser.parse_args()
    if options.at_once:
        report_at_once(options)
        return
    questions = questions_of(options.questions)
    cases: list[dict[str, Any]] = []
    if options.service in ("engine", "both"):
        with ChatLocal.from_pretrained(options.model, max_tokens=options.max_tokens) as chat:
            service = engine_service(chat, options.engine_rates)
            asyncio.run(run(service.chains["sot"], questions[:2], 10.0, seed=0))  # warms up
            cases += measure(service, questions, repeats=options.repeats)
    if options.service in ("api", "both"):
        api = api_service(options.api_rates, requests_per_window=60, window_seconds=4.0)
        cases += measure(api, questions, repeats=options.repeats)
    table = Table("service", "rate", "method", "median s", "95 % s", "answers/s", "by SoT")
    for case in cases:
        table.add_row(
            case["service"],
            f"{case['rate']:g}",
            _NAMES[case["way"]],
            f"{case['median_seconds']:.2f}",
            f"{case['p95_seconds']:.2f}",
            f"{case['answers_per_second']:.2f}",
            f"{100 * case['share_of_sot']:.0f} %",
        )
    Console().print(table)
    found = {**summary(cases), "num_questions": len(questions), "repeats": options.repeats}
    path = options.picture
    if options.save:
        path = save(f"load_{options.service}", found, cases).with_suffix(".png") if path is None else path
        RESULTS.mkdir(exist_ok=True)
    if path is not None:
        picture(cases).savefig(path, dpi=110)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
