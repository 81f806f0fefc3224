"""Skeleton-of-Thought against plain answers beside the other figures of ``benchmarks.peers_gpu``.

Questions, chains and figures are those of ``benchmarks.sot_models``. Does not know other engines.
"""

from __future__ import annotations

import time
from typing import Any

from rich.table import Table

from benchmarks.sot_models import add_relevance, make_chains, measure, read, summarize
from benchmarks.time_limit import TimeIsUp
from benchmarks.workloads import VICUNA, questions
from local_backend import ChatLocal

_SOT_FIGURES = (
    "equal_length_speedup_median",
    "tokens_per_second_ratio_median",
    "speedup_median",
    "tokens_ratio_median",
    "slowest",
    "by_sot",
    "questions",
)


async def compare_sot(chat: ChatLocal, num_questions: int, seconds: float) -> dict[str, Any]:
    """Plain answers against Skeleton-of-Thought, for as many questions as there is time for, at least one."""
    deadline = time.perf_counter() + seconds
    asked = (
        read(None, num_questions) if VICUNA.exists() else [{"question": q} for q in questions(num_questions)]
    )
    chains, cases = make_chains(chat), list[dict[str, Any]]()
    try:
        await measure(chat, chains, asked[0]["question"], sot_first=False)  # a warm-up
        for number, one in enumerate(asked):
            if cases and time.perf_counter() > deadline:
                break
            cases.append(await measure(chat, chains, one["question"], sot_first=bool(number % 2)))
    except TimeIsUp:
        pass
    if cases:
        add_relevance(cases)
    return summarize(cases)


def sot_table(figures: dict[str, Any]) -> Table:
    """The figures that compare the two ways to answer."""
    table = Table("plain against points", "")
    for name in _SOT_FIGURES:
        table.add_row(name.replace("_", " "), str(figures[name]))
    return table
