"""How much faster Skeleton-of-Thought is than plain decoding, on a local model.

Every question is answered plainly and by Skeleton-of-Thought in one run; which of them goes first alternates,
and the prefix cache is cleared before every answer. The token counts are reported too, and how many answers
repeat themselves, because endless repetition takes time and is worthless.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.results import save
from benchmarks.workloads import add_model_argument, repeats_itself
from benchmarks.workloads import questions as questions_of
from local_backend import ChatLocal
from sot_chains import SkeletonOfThought


async def measure(
    chat: ChatLocal, sot: SkeletonOfThought, question: str, *, sot_first: bool
) -> dict[str, Any]:
    """Answer one question by both methods; returns seconds, tokens and the critical path."""
    case: dict[str, Any] = {}
    for way in ("sot", "plain") if sot_first else ("plain", "sot"):
        chat.engine.forget_prefixes()
        begin = time.perf_counter()
        answer = await (sot if way == "sot" else chat).ainvoke(question)
        case[f"{way}_seconds"] = time.perf_counter() - begin
        token_ids = chat.get_token_ids(answer.text)
        case[f"{way}_tokens"] = len(token_ids)
        case[f"{way}_repeats_itself"] = repeats_itself(token_ids)
        case[f"{way}_characters"] = len(answer.text.strip())
        if way == "sot":
            trace = answer.response_metadata["sot"]
            case["route"] = trace["route"]
            case["num_points"] = len(trace["points"])
            case["critical_path_seconds"] = trace["critical_path_seconds"]
    return case


async def measure_all(questions: Sequence[str], *, repeats: int, **loading: Any) -> list[dict[str, Any]]:
    """The median of ``repeats`` runs for each question.

    Args:
        questions: The questions.
        repeats: Runs of each question.
        loading: Arguments of ``ChatLocal.from_pretrained``.
    """
    cases = []
    with ChatLocal.from_pretrained(**loading) as chat:
        sot = SkeletonOfThought(chat, router="always")
        for warm_up in questions[:2]:
            await measure(chat, sot, warm_up, sot_first=False)
        for number, question in enumerate(track(questions, "Answering", console=Console(stderr=True))):
            runs = [
                await measure(chat, sot, question, sot_first=bool((number + repeat) % 2))
                for repeat in range(repeats)
            ]
            case = dict(runs[0])
            for name in ("plain_seconds", "sot_seconds", "critical_path_seconds"):
                case[name] = statistics.median(run[name] for run in runs)
            case["speedup"] = case["plain_seconds"] / case["sot_seconds"]
            cases.append({"question": number, **case})
    return cases


def summarize(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summary in the JSON line."""
    by_sot = [case for case in cases if case["route"] == "sot"]

    def median(values: Sequence[float]) -> float | None:
        return round(statistics.median(values), 3) if values else None

    speedups = sorted(case["speedup"] for case in by_sot)
    return {
        "questions": len(cases),
        "answered": sum(case["sot_characters"] > 0 and case["plain_characters"] > 0 for case in cases),
        "by_sot": len(by_sot),
        "repeat_themselves": {
            way: sum(case[f"{way}_repeats_itself"] for case in cases) for way in ("plain", "sot")
        },
        "tokens_ratio": median([case["sot_tokens"] / max(1, case["plain_tokens"]) for case in by_sot]),
        "speedup_median": median(speedups),
        "speedup_p10": round(speedups[len(speedups) // 10], 3) if speedups else None,
        "critical_path_ratio_median": median(
            [case["sot_seconds"] / case["critical_path_seconds"] for case in by_sot]
        ),
    }


def print_table(cases: Sequence[dict[str, Any]]) -> None:
    table = Table("", "questions", "points", "plain s", "SoT s", "plain tokens", "SoT tokens", "speed-up")
    by_sot = [case for case in cases if case["route"] == "sot"]
    groups = {
        "answered point by point": by_sot,
        "answered plainly": [case for case in cases if case["route"] != "sot"],
    }
    for title, group in groups.items():
        if group:
            names = ("num_points", "plain_seconds", "sot_seconds", "plain_tokens", "sot_tokens", "speedup")
            medians = [f"{statistics.median(case[name] for case in group):.2f}" for name in names]
            table.add_row(title, str(len(group)), *medians)
    Console(width=110).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sot_latency", description=__doc__)
    add_model_argument(parser)
    parser.add_argument("--dtype", default="auto", help="number format of the model (%(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=1024, help="maximum tokens of a reply (%(default)s)"
    )
    parser.add_argument("--questions", type=Path, help="JSON lines with a 'question' each")
    parser.add_argument("--limit", type=int, help="use at most this many questions")
    parser.add_argument("--repeats", type=int, default=3, help="runs per question; the median is reported")
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    try:
        questions = questions_of(options.limit, options.questions)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    cases = asyncio.run(
        measure_all(
            questions,
            repeats=options.repeats,
            path_or_name=options.model,
            dtype=options.dtype,
            max_tokens=options.max_tokens,
        )
    )
    print_table(cases)
    settings = {"model": options.model or "default", "max_tokens": options.max_tokens}
    summary = {**settings, **summarize(cases)}
    if options.save:
        save("sot_latency", summary, cases)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
