"""Skeleton-of-Thought over a running vLLM: speed-up over plain answers, by the questions asked at once.

Asks the same questions plainly and point by point, several at a time, and reads from vLLM's metrics how much
of the prompts was found in its prefix cache. The two ways alternate. Start vLLM first, see the guide::

    python -m benchmarks.sot_vllm --base-url http://127.0.0.1:8000/v1 --model MODEL --save
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from benchmarks.results import save
from benchmarks.workloads import VICUNA
from local_backend.offline.jsonl import read_lines
from sot_chains import Limits, SkeletonOfThought, close_clients
from sot_chains.calls.usage import num_tokens


def prefix_cache(base_url: str) -> tuple[float, float]:
    """Counts of prompt tokens that vLLM has looked up in its prefix cache, and found there."""
    with urllib.request.urlopen(f"{base_url.removesuffix('/v1')}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    queries, hits = (
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:prefix_cache_{name}_total"))
        for name in ("queries", "hits")
    )
    return queries, hits


async def measure(
    options: argparse.Namespace, questions: Sequence[str], num_at_once: int
) -> list[dict[str, Any]]:
    """Both ways, for groups of ``num_at_once`` questions; one case for each way and group."""
    plain = ChatOpenAI(
        model=options.model,
        base_url=options.base_url,
        api_key=SecretStr("none"),
        temperature=0.0,
        max_completion_tokens=options.max_tokens,
    )
    sot = SkeletonOfThought(
        f"openai:{options.model}",
        base_url=options.base_url,
        router="always",
        detail=options.detail,
        limits=Limits(max_concurrent=256, key="sot_vllm"),
    )

    async def timed(way: str, question: str) -> tuple[float, AIMessage]:
        begin = time.perf_counter()
        if way == "sot":
            message = await sot.ainvoke(question, temperature=0.0, max_tokens=options.max_tokens)
        else:
            message = await plain.ainvoke(question)
        return time.perf_counter() - begin, message

    cases: list[dict[str, Any]] = []
    groups = [questions[at : at + num_at_once] for at in range(0, len(questions), num_at_once)]
    for number, group in enumerate(groups):
        for way in ("sot", "plain") if number % 2 else ("plain", "sot"):
            looked_up, found = prefix_cache(options.base_url)
            begin = time.perf_counter()
            answers = await asyncio.gather(*(timed(way, question) for question in group))
            seconds = time.perf_counter() - begin
            looked_up_after, found_after = prefix_cache(options.base_url)
            cases.append(
                {
                    "way": way,
                    "num_at_once": num_at_once,
                    "all_seconds": round(seconds, 2),
                    "seconds": [round(each, 2) for each, _ in answers],
                    "tokens": [num_tokens(message.text) for _, message in answers],
                    "routes": [
                        message.response_metadata.get("sot", {}).get("route") for _, message in answers
                    ],
                    "num_looked_up": looked_up_after - looked_up,
                    "num_found": found_after - found,
                }
            )
    return cases


def summarize(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the cases with the same number of questions at once."""
    by_way = {way: [case for case in cases if case["way"] == way] for way in ("plain", "sot")}
    seconds, tokens = (
        {way: statistics.mean(each for case in of for each in case[name]) for way, of in by_way.items()}
        for name in ("seconds", "tokens")
    )
    hits = {
        way: sum(case["num_found"] for case in of) / sum(case["num_looked_up"] for case in of)
        for way, of in by_way.items()
    }
    routes = [route for case in by_way["sot"] for route in case["routes"]]
    return {
        "num_at_once": cases[0]["num_at_once"],
        "questions": len(routes),
        "by_sot": routes.count("sot"),
        "plain_seconds": round(seconds["plain"], 2),
        "sot_seconds": round(seconds["sot"], 2),
        "speedup": round(seconds["plain"] / seconds["sot"], 2),
        "tokens_ratio": round(tokens["sot"] / tokens["plain"], 2),
        "prefix_hits_plain": round(hits["plain"], 3),
        "prefix_hits_sot": round(hits["sot"], 3),
    }


async def measure_all(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Summaries and cases, after a warm-up with a question that is not counted."""
    # No question is asked twice in one way: what is found in the prefix cache is what answers share.
    nums = [max(options.questions, num_at_once) for num_at_once in options.at_once]
    questions = [str(line.record()["question"]) for line in read_lines(VICUNA)]
    if 1 + sum(nums) > len(questions):
        raise ValueError(f"there are {len(questions)} questions, not {1 + sum(nums)}: ask fewer")
    # The file is sorted by category.
    random.Random(0).shuffle(questions)
    await measure(options, [questions.pop()], 1)
    summaries: list[dict[str, Any]] = []
    cases: list[dict[str, Any]] = []
    for num_at_once, num_questions in zip(options.at_once, nums, strict=True):
        asked, questions = questions[:num_questions], questions[num_questions:]
        of_this = await measure(options, asked, num_at_once)
        summaries.append(summarize(of_this))
        print(json.dumps(summaries[-1]), flush=True)
        cases += of_this
    await close_clients()
    return summaries, cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="default", help="the name that vLLM serves it as (%(default)s)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--questions", type=int, default=8, help="at least, each time (%(default)s)")
    parser.add_argument("--detail", choices=("brief", "normal", "full"), default="normal")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer or a call (%(default)s)")
    parser.add_argument("--save", action="store_true", help="keep the result")
    options = parser.parse_args()
    summaries, cases = asyncio.run(measure_all(options))
    table = Table(*(summaries[0]))
    for summary in summaries:
        table.add_row(*map(str, summary.values()))
    Console(width=140).print(table)
    if options.save:
        asked = {"detail": options.detail, "max_tokens": options.max_tokens}
        print(save("sot_vllm", {**asked, "by_num_at_once": summaries}, cases))


if __name__ == "__main__":
    main()
