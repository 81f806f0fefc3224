"""Tokens per second while another process keeps one core busy, over those of the quiet machine.

Rounds alternate between quiet and busy. Run it on a machine on which nothing else computes, with as many
threads as there are cores (``OMP_NUM_THREADS`` not set).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from rich.table import Table

from benchmarks.results import add_save_argument, report
from benchmarks.workloads import add_model_argument, questions
from local_backend import ChatLocal, SamplingParams

_BUSY = [sys.executable, "-c", "while True: pass"]
_SETTLE_SECONDS = 0.5


def measure(chat: ChatLocal, max_tokens: int, *, is_busy: bool) -> float:
    """Tokens per second of one answer."""
    with ExitStack() as ended:
        if is_busy:
            process = ended.enter_context(subprocess.Popen(_BUSY))
            ended.callback(process.kill)
            time.sleep(_SETTLE_SECONDS)  # until the other process computes
        started = time.perf_counter()
        prompt = chat.get_token_ids(questions(1)[0])
        chat.engine.generate([prompt], SamplingParams(max_tokens=max_tokens, ignore_end=True))
        return max_tokens / (time.perf_counter() - started)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy_core", description=__doc__)
    add_model_argument(parser)
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (%(default)s)")
    add_save_argument(parser)
    options = parser.parse_args(arguments)
    speeds: dict[bool, list[float]] = {False: [], True: []}
    with ChatLocal.from_pretrained(options.model, device="cpu") as chat:
        for _ in range(options.repeats):
            for is_busy, found in speeds.items():
                found.append(measure(chat, options.max_tokens, is_busy=is_busy))
    quiet, busy = (statistics.median(found) for found in speeds.values())
    summary = {
        "threads": torch.get_num_threads(),
        "quiet_tokens_per_second": round(quiet, 2),
        "busy_tokens_per_second": round(busy, 2),
        "busy_over_quiet": round(busy / quiet, 3),
    }
    table = Table("threads", "quiet, tokens/s", "one core busy, tokens/s", "ratio")
    table.add_row(*map(str, summary.values()))
    report("busy_core", table, summary, keep=options.save)


if __name__ == "__main__":
    main()
