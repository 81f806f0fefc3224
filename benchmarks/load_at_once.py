"""Many questions at the same moment: useful tokens a second, plainly and as the router decides.

So many questions are asked of the engine and of ``sot serve`` before it. Useful tokens count: those of the
answers, each up to its first repetition. ``python -m benchmarks.load --at-once 1 4 16``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import uvicorn
from rich.console import Console
from rich.table import Table

from benchmarks.mistakes import without_loop
from benchmarks.results import save
from benchmarks.workloads import questions as questions_at_hand
from local_backend import ChatLocal
from sot_chains import SkeletonOfThought
from sot_chains.serving.app import create_app


def questions_of(count: int) -> list[str]:
    """The same ``count`` questions each time; they repeat if there are too few."""
    found = questions_at_hand()
    return [found[number % len(found)] for number in range(count)]


async def ask_at_once(
    ask: Callable[[str, str], Awaitable[tuple[str, bool]]],
    count: Callable[[str], int],
    questions: Sequence[str],
) -> dict[str, dict[str, float]]:
    """Useful tokens a second, by way, of ``questions`` that are asked at the same moment; each way twice."""
    figures: dict[str, list[dict[str, float]]] = {"plain": [], "auto": []}
    for way in ("plain", "auto", "auto", "plain"):
        begin = time.perf_counter()
        answers = await asyncio.gather(*(ask(way, question) for question in questions))
        seconds = time.perf_counter() - begin
        tokens = sum(count(without_loop(text)) for text, _ in answers)
        share = sum(by_points for _, by_points in answers) / len(answers)
        figures[way].append(
            {"tokens_per_second": tokens / seconds, "seconds": seconds, "share_of_sot": share}
        )
    return {
        way: {key: round(statistics.fmean(run[key] for run in runs), 3) for key in runs[0]}
        for way, runs in figures.items()
    }


def measure_at_once(chat: ChatLocal, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Plain against the router's choice for so many questions at once, by engine and by ``sot serve``."""
    chains = {"plain": SkeletonOfThought(chat, router="never"), "auto": SkeletonOfThought(chat)}
    suffixes = {"plain": "", "auto": ":auto"}

    async def ask_chain(way: str, question: str) -> tuple[str, bool]:
        message = await chains[way].ainvoke(question)
        return message.text, message.response_metadata["sot"]["route"] == "sot"

    async def run_all() -> list[dict[str, Any]]:
        cases = []
        with serving(create_app(chat)) as port:
            client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600)

            async def ask_server(way: str, question: str) -> tuple[str, bool]:
                reply = await client.chat.completions.create(
                    model=chat.model_name + suffixes[way], messages=[{"role": "user", "content": question}]
                )
                text = reply.choices[0].message.content or ""
                return text, text.startswith("1. **")

            for name, ask in (("engine", ask_chain), ("sot serve", ask_server)):
                await ask_at_once(ask, chat.get_num_tokens, questions_of(1))  # warms up
                for size in sizes:
                    found = await ask_at_once(ask, chat.get_num_tokens, questions_of(size))
                    cases += [{"service": name, "at_once": size, "way": way, **found[way]} for way in found]
            await client.close()
        return cases

    return asyncio.run(run_all())


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """Serves ``app`` from a thread, on the port that is yielded."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", log_config=None, ws="none"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def report_at_once(options: argparse.Namespace) -> None:
    """Prints the table of ``--at-once`` and the JSON line."""
    with ChatLocal.from_pretrained(options.model, max_tokens=options.max_tokens, dtype=options.dtype) as chat:
        cases = measure_at_once(chat, options.at_once)
    table = Table("service", "at once", "way", "tokens/s", "seconds", "by points")
    rates: dict[str, dict[str, float]] = {}
    for case in cases:
        rates.setdefault(f"{case['service']} {case['at_once']}", {})[case["way"]] = case["tokens_per_second"]
        figures = (
            f"{case['tokens_per_second']:.1f}",
            f"{case['seconds']:.2f}",
            f"{case['share_of_sot']:.0%}",
        )
        table.add_row(case["service"], str(case["at_once"]), case["way"], *figures)
    Console().print(table)
    found = {name: round(of_one["auto"] / of_one["plain"], 3) for name, of_one in rates.items()}
    if options.save:
        save("load_at_once", found, cases)
    print(json.dumps(found))
