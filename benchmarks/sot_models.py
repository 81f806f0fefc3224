"""Skeleton-of-Thought on real models: speed, length and the mistakes that can be counted without a judge.

Each question is answered plainly and by Skeleton-of-Thought, alternating which goes first, on every model
that is named; both by a chain, so under the same bounds and guards. The first figure is the speed-up at equal
length: seconds per token of the answers, of which each ends at its first repetition if it loops. Counted are
outlines that copy the examples, points that run into others, empty points, answers that repeat the same eight
words three times, the faults of ``benchmarks.mistakes`` and relevance: the cosine of question and answer by a
sentence encoder, over that of the plain answer. One table and one JSON line for each model; with ``--save`` a
dated file and a picture of the speed-up by category.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.mistakes import TEXT_FAULTS, count_mistakes, is_looped, without_loop
from benchmarks.results import RESULTS, save
from benchmarks.workloads import VICUNA
from local_backend import ChatLocal
from local_backend.offline.jsonl import read_lines
from retrieval_copy.stores.stores import SentenceEmbeddings
from sot_chains import SkeletonOfThought
from sot_chains.calls.usage import num_tokens


def make_chains(model: Any, *, with_router: bool = True, **options: Any) -> dict[str, SkeletonOfThought]:
    """The two ways to answer with a chat model, or one named as ``"openai:NAME"``."""
    router: dict[str, Any] = {} if with_router else {"router": "always"}
    return {
        "sot": SkeletonOfThought(model, **options, **router),
        "plain": SkeletonOfThought(model, **options, router="never"),
    }


async def measure(
    model: Any, chains: Mapping[str, SkeletonOfThought], question: str, *, sot_first: bool
) -> dict[str, Any]:
    """Answers one question by both methods."""
    case: dict[str, Any] = {"question": question}
    count = model.get_num_tokens if isinstance(model, ChatLocal) else num_tokens
    for way in ("sot", "plain") if sot_first else ("plain", "sot"):
        begin = time.perf_counter()
        answer = await chains[way].ainvoke(question)
        seconds = time.perf_counter() - begin
        trace = answer.response_metadata["sot"]
        case |= {
            f"{way}_seconds": seconds,
            f"{way}_first_text_seconds": trace["first_text_seconds"],
            f"{way}_text": answer.text,
            f"{way}_tokens": count(answer.text),
            f"{way}_tokens_before_loop": count(without_loop(answer.text)),
        }
        if way == "plain":
            case["plain_looped"] = is_looped(answer.text)
        else:
            case |= {
                "route": trace["route"],
                "reason": trace["route_reason"],
                "num_points": len(trace["points"]),
                "critical_path_seconds": trace["critical_path_seconds"],
                "skeleton_seconds": (call := trace["skeleton_call"]) and call["end_seconds"],
                **count_mistakes(question, answer.text, trace),
                "stopped": Counter(p["stopped_by"] for p in trace["points"] if p["stopped_by"]),
            }
    return case


def add_relevance(cases: Sequence[dict[str, Any]]) -> None:
    """Adds the cosine of answer and question, over that of the plain answer."""
    encoder = SentenceEmbeddings()
    vectors = encoder.embed_documents(
        [c[k] or " " for c in cases for k in ("question", "sot_text", "plain_text")]
    )
    for number, case in enumerate(cases):
        question, sot, plain = vectors[3 * number : 3 * number + 3]
        of_sot, of_plain = (sum(a * b for a, b in zip(question, one, strict=True)) for one in (sot, plain))
        case["relevance"] = of_sot / max(of_plain, 1e-6)


def summarize(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the JSON line; over answers by Skeleton-of-Thought where not said otherwise."""
    by_sot = [case for case in cases if case["route"] == "sot"]

    def median(values: Sequence[float]) -> float | None:
        return round(statistics.median(values), 3) if values else None

    def ratios(over: str, under: str) -> list[float]:
        return sorted(case[over] / max(1e-9, case[under]) for case in by_sot)

    def rates(way: str, tokens: str) -> list[float]:
        return [case[f"{way}_{tokens}"] / case[f"{way}_seconds"] for case in by_sot]

    def rate_ratio(tokens: str) -> float | None:
        pairs = zip(rates("sot", tokens), rates("plain", tokens), strict=True)
        return median([of_sot / max(1e-9, of_plain) for of_sot, of_plain in pairs])

    speedups, lengths = ratios("plain_seconds", "sot_seconds"), ratios("sot_tokens", "plain_tokens")
    counted = ("echoed", "overrun", "empty", "looped", *TEXT_FAULTS)
    return {
        "equal_length_speedup_median": rate_ratio("tokens_before_loop"),
        "speedup_median": median(speedups),
        "speedup_p10": round(speedups[len(speedups) // 10], 3) if speedups else None,
        "tokens_ratio_median": median(lengths),
        "first_text_seconds_median": median([case["sot_first_text_seconds"] for case in by_sot]),
        "plain_first_text_seconds_median": median([case["plain_first_text_seconds"] for case in by_sot]),
        **{name: sum(case[name] for case in by_sot) for name in counted},
        "looped_plain": sum(case["plain_looped"] for case in by_sot),
        "relevance": median([case["relevance"] for case in by_sot]),
        "slowest": round(max((c["sot_seconds"] / c["plain_seconds"] for c in cases), default=0.0), 3),
        "tokens_per_second_ratio_median": rate_ratio("tokens"),
        "critical_path_ratio_median": median(ratios("sot_seconds", "critical_path_seconds")),
        "num_points_median": median([case["num_points"] for case in by_sot]),
        "questions": len(cases),
        "by_sot": len(by_sot),
    }


def read(path: Path | None, limit: int | None) -> list[dict[str, str]]:
    """Questions with their categories, if the file has any."""
    path = path or VICUNA
    records = [line.record() for line in read_lines(path)]
    if limit and limit < len(records):  # of all categories alike
        records = records[:: max(1, len(records) // limit)][:limit]
    return [{"question": r["question"], "category": str(r.get("category", ""))} for r in records]


def _read_done(path: Path | None, name: str | None) -> dict[str, dict[str, Any]]:
    """By question, what an earlier run has measured on the model."""
    if path is None or not path.exists():
        return {}
    cases = [line.record() for line in read_lines(path)]
    return {case["question"]: case for case in cases if case.get("model", name) == name}


async def measure_all(
    name: str | None, questions: Sequence[dict[str, str]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All questions on one model."""
    done = _read_done(options.texts, name)
    cases = []
    with ExitStack() as opened:
        if name and name.startswith(("openai:", "anthropic:")):
            to_ask: Any = name
            model: Any = None
            own: dict[str, Any] = {"base_url": options.base_url}
        else:
            model = opened.enter_context(
                ChatLocal.from_pretrained(name, dtype=options.dtype, max_tokens=options.max_tokens)
            )
            to_ask, own = model, {}
        own |= {"detail": options.detail}
        chains = make_chains(to_ask, with_router=options.router, **own)
        for warm_up in questions[:2]:
            await measure(model, chains, warm_up["question"], sot_first=False)
        for number, one in enumerate(track(questions, name or "default", console=Console(stderr=True))):
            if one["question"] in done:
                cases.append(done[one["question"]])
                continue
            case = await measure(model, chains, one["question"], sot_first=bool(number % 2))
            cases.append({"model": name, "category": one["category"], **case})
            if options.texts:  # as they come: a long run may be broken off
                with options.texts.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(cases[-1], ensure_ascii=False) + "\n")
    add_relevance(cases)
    return cases


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Speed-up by category, as in the paper's figure."""
    from matplotlib.figure import Figure

    by_category = defaultdict(list)
    for case in cases:
        if case["route"] == "sot":
            by_category[case["category"] or "all"].append(case["plain_seconds"] / case["sot_seconds"])
    names = sorted(by_category, key=lambda name: statistics.median(by_category[name]))
    figure = Figure(figsize=(7, 0.5 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.boxplot([by_category[name] for name in names], orientation="horizontal", tick_labels=names)
    axes.axvline(1.0, color="#374151", linewidth=0.8)
    axes.set_xlabel("plain seconds over Skeleton-of-Thought's")
    figure.savefig(path, dpi=110)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One line a figure, one column a model: there are more figures than models."""
    table = Table("", *(row["model"] for row in rows))
    for key in [key for key in rows[0] if key != "model"]:
        table.add_row(key.removesuffix("_median").replace("_", " "), *(str(row[key]) for row in rows))
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sot_models", description=__doc__)
    parser.add_argument(
        "--model",
        action="append",
        help="folder, GGUF file or hub name, or openai:NAME; may be repeated (the default model)",
    )
    parser.add_argument("--base-url", help="server of openai:NAME")
    parser.add_argument(
        "--questions", type=Path, help="JSON lines with 'question' and 'category' (Vicuna's 80)"
    )
    parser.add_argument("--limit", type=int, help="use this many questions, spread over the file")
    parser.add_argument("--detail", choices=("brief", "normal", "full"), default="normal")
    parser.add_argument("--no-router", dest="router", action="store_false", help="take every question apart")
    parser.add_argument("--dtype", default="auto", help="number format of local models (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="maximum of a plain reply (%(default)s)")
    parser.add_argument("--save", action="store_true", help="keep a dated file and a picture")
    parser.add_argument(
        "--texts",
        type=Path,
        help="append questions and answers to this file, to be read; what it has is not measured again",
    )
    options = parser.parse_args(arguments)
    try:
        questions = read(options.questions, options.limit)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    rows = []
    for name in options.model or [None]:
        cases = asyncio.run(measure_all(name, questions, options))
        row = {"model": Path(name).name if name else "default", **summarize(cases), "detail": options.detail}
        rows.append(row)
        if options.save:
            kept = [{k: v for k, v in case.items() if not k.endswith("_text")} for case in cases]
            path = save(f"sot_models_{row['model']}_{options.detail}", row, kept)
            draw(cases, RESULTS / path.with_suffix(".png").name)
    print_table(rows)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
