"""Threads that do nothing leave no OpenMP workers behind, which would slow down those that compute."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import os
import time
import torch
from local_backend import Engine, SamplingParams
from local_backend.kernels.openmp import ThreadChoice, release_workers
from tests.tiny import tiny_chat_model, tiny_tokenizer

def num_threads():
    return len(os.listdir("/proc/self/task"))

def wait_for(expected):
    for _ in range(2_000):
        if num_threads() == expected:
            return
        time.sleep(0.005)  # 10 s at most: a thread that ended is listed for a moment
    raise AssertionError(f"{num_threads()} threads, {expected} expected")

def settled():
    counts = [num_threads()]
    while counts[-50:] != counts[-1:] * 50:
        time.sleep(0.01)  # between two looks at the threads
        counts.append(num_threads())
    return counts[-1]

def compute():
    torch.randn(2_000_000).exp()

torch.set_num_threads(3)
release_workers()
before = settled()
compute()
wait_for(before + 2)  # else torch does not compute with OpenMP, and the test tests nothing
release_workers()
release_workers()
wait_for(before)
compute()
assert torch.get_num_threads() == 3
wait_for(before + 2)

with Engine(tiny_chat_model(), tiny_tokenizer(), "reference_copy", max_rows=2) as engine:
    engine._loop._threads = ThreadChoice(1)  # leaves the number of threads alone
    working = []

    def at_work(token_ids, scores):
        compute()
        working.append(num_threads())
        return scores

    def generate(**options):
        params = SamplingParams(max_tokens=4, ignore_end=True, **options)
        engine.generate([list(range(3, 40))], params)

    generate()
    release_workers()
    idle = settled()
    compute()
    generate()
    wait_for(idle)  # else the caller's workers wait
    generate(logits_processors=(at_work,))
    assert set(working) == {idle + 2}, f"{working} threads at work, {idle} without work"
    wait_for(idle)  # else the engine's workers wait
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc, which Linux has")
def test_workers_are_released() -> None:
    """Of a thread, and of an engine that has nothing left to do, which releases those of its caller, too."""
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
