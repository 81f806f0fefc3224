"""Answers whose parts build on each other: the fan-out against its longest path, and a real model.

Random graphs of thoughts are written by completions that take a fixed time, as in ``benchmarks.fan_out``; no
schedule is faster than the longest path. The model answers questions of the categories in which
Skeleton-of-Thought loses in its paper (math, coding, writing): plainly, and with points that may build on
each other and a conclusion, alternating which goes first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.fan_out import PacedProvider
from benchmarks.results import save
from benchmarks.workloads import VICUNA
from local_backend import ChatLocal
from local_backend.offline.jsonl import read_lines
from sot_chains import SkeletonOfThought, Thought, ThoughtGraph

_CATEGORIES = ("math", "coding", "writing")
_QUESTION = "How do I plan this?"

Edges = Mapping[int, Sequence[int]]


def random_graph(num_nodes: int, density: float, rng: random.Random) -> dict[int, list[int]]:
    """What each node builds on: earlier nodes, each with probability ``density``."""
    return {node: [need for need in range(node) if rng.random() < density] for node in range(num_nodes)}


def longest_path(edges: Edges) -> int:
    """Nodes on the longest path."""
    levels: dict[int, int] = {}
    for node, needs in edges.items():
        levels[node] = 1 + max((levels[need] for need in needs), default=0)
    return max(levels.values())


async def over_longest_path(edges: Edges, seconds: float) -> float:
    """The time of a graph with completions of ``seconds``, over that of its longest path."""
    thoughts = [
        Thought(
            name=f"Part {node}", prompt=f"Write part {node}.", needs=tuple(f"Part {need}" for need in needs)
        )
        for node, needs in edges.items()
    ]
    graph = ThoughtGraph(PacedProvider(seconds), thoughts)
    begin = time.perf_counter()
    await graph.ainvoke(_QUESTION)
    return (time.perf_counter() - begin) / (seconds * longest_path(edges))


async def measure(model: ChatLocal, question: str, *, graph_first: bool) -> dict[str, Any]:
    """One question, plainly and as a graph."""
    graph = SkeletonOfThought(model, router="always", dependencies=True, conclusion=True)
    case: dict[str, Any] = {"question": question}
    for way in ("graph", "plain") if graph_first else ("plain", "graph"):
        begin = time.perf_counter()
        answer = await (graph if way == "graph" else model).ainvoke(question)
        case[f"{way}_seconds"] = time.perf_counter() - begin
        case[f"{way}_tokens"] = model.get_num_tokens(answer.text)
        case[f"{way}_text"] = answer.text
        if way == "graph":
            trace = answer.response_metadata["sot"]
            case["route"] = trace["route"]
            case["num_edges"] = sum(len(point["needs"]) for point in trace["points"])
            case["critical_path_seconds"] = trace["critical_path_seconds"]
    return case


def questions_of(path: Path | None, limit: int) -> list[dict[str, str]]:
    """Questions of :data:`_CATEGORIES`, of each alike; none where the file is not there."""
    path = path or VICUNA
    if not path.exists():
        return []
    records = [line.record() for line in read_lines(path)]
    records = [one for one in records if one.get("category", "writing") in _CATEGORIES]
    return [
        {"question": str(one["question"]), "category": str(one.get("category", ""))}
        for one in records[:: max(1, len(records) // max(1, limit))][:limit]
    ]


async def measure_model(name: str | None, questions: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """All questions on one model."""
    cases = []
    with ExitStack() as opened:
        model = opened.enter_context(ChatLocal.from_pretrained(name))
        if questions:
            await measure(model, questions[0]["question"], graph_first=False)  # to warm up
        for number, one in enumerate(track(questions, name or "default", console=Console(stderr=True))):
            case = await measure(model, one["question"], graph_first=bool(number % 2))
            cases.append({"category": one["category"], **case})
    return cases


def summarize(ratios: Sequence[float], cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the JSON line."""
    by_graph = [case for case in cases if case["route"] != "plain"]

    def median(values: Sequence[float]) -> float | None:
        return round(statistics.median(values), 3) if values else None

    return {
        "graphs": len(ratios),
        "over_longest_path": median(ratios),
        "over_longest_path_worst": round(max(ratios), 3) if ratios else None,
        "questions": len(cases),
        "by_graph": len(by_graph),
        "speedup_median": median([case["plain_seconds"] / case["graph_seconds"] for case in by_graph]),
        "tokens_ratio_median": median(
            [case["graph_tokens"] / max(1, case["plain_tokens"]) for case in by_graph]
        ),
        "edges_median": median([case["num_edges"] for case in by_graph]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.thought_graph", description=__doc__)
    parser.add_argument("--model", help="folder, GGUF file or hub name (the default model)")
    parser.add_argument("--questions", type=Path, help="JSON lines with 'question' and 'category' (Vicuna's)")
    parser.add_argument("--limit", type=int, default=6, help="questions; 0 for none (%(default)s)")
    parser.add_argument("--graphs", type=int, default=40, help="random graphs (%(default)s)")
    parser.add_argument("--nodes", type=int, default=50, help="their nodes, at most (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.05, help="of a paced completion (%(default)s)")
    parser.add_argument("--save", action="store_true", help="keep a dated file")
    options = parser.parse_args(arguments)
    rng = random.Random(7)
    ratios, table = [], Table("nodes", "edges", "longest path", "time over it")
    for number in track(range(options.graphs), "graphs", console=Console(stderr=True)):
        edges = random_graph(rng.randint(1, options.nodes), rng.choice([0.02, 0.1, 0.3]), rng)
        ratios.append(asyncio.run(over_longest_path(edges, options.seconds)))
        if number < 8:
            num_edges = sum(map(len, edges.values()))
            table.add_row(str(len(edges)), str(num_edges), str(longest_path(edges)), f"{ratios[-1]:.3f}")
    questions = questions_of(options.questions, options.limit) if options.limit else []
    cases = asyncio.run(measure_model(options.model, questions)) if questions else []
    summary = {"model": Path(options.model).name if options.model else "default", **summarize(ratios, cases)}
    for case in cases:
        table.add_row(case["question"][:40], str(case["num_edges"]), case["route"], "")
    Console(width=110).print(table)
    if options.save:
        kept = [{name: value for name, value in case.items() if not name.endswith("_text")} for case in cases]
        save("thought_graph", summary, kept)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
