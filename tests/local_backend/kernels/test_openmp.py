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
from local_backend.kernels.openmp import release_workers
from tests.tiny import tiny_chat_model, tiny_tokenizer

def num_threads():
    return len(os.listdir("/proc/self/task"))

def settles_at(expected):
    for _ in range(1_000):
        if num_threads() == expected:
            return True
        time.sleep(0.005)  # at most 5 s: a thread that ended is listed for a moment
    return False

def compute():
    torch.randn(2_000_000).exp()

torch.set_num_threads(3)
release_workers()
time.sleep(0.2)
before = num_threads()
compute()
assert num_threads() == before + 2, "torch does not compute with OpenMP: the test tests nothing"
release_workers()
release_workers()
assert settles_at(before), f"{num_threads()} threads, {before} expected"
compute()
assert torch.get_num_threads() == 3 and num_threads() == before + 2

with Engine(tiny_chat_model(), tiny_tokenizer(), "reference_copy", max_rows=2) as engine:
    def generate():
        engine.generate([list(range(3, 40))], SamplingParams(max_tokens=4, ignore_end=True))

    def at_work():
        compute()
        return num_threads()

    generate()
    time.sleep(0.5)  # until the engine is idle; if it were not yet, the counts below would differ
    release_workers()
    idle = num_threads()
    compute()
    generate()
    assert settles_at(idle), f"the caller's workers wait: {num_threads()} threads, {idle} expected"
    working = []
    engine._loop.before_next_step(lambda: working.append(at_work()))
    engine._worker.wake()
    for _ in range(1_000):
        if working:
            break
        time.sleep(0.005)  # at most 5 s: the engine's thread runs the errand
    assert working == [idle + 2], f"{working} threads at work, {idle} without work"
    assert settles_at(idle), f"the engine's workers wait: {num_threads()} threads, {idle} expected"
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc, which Linux has")
def test_workers_are_released() -> None:
    """Of a thread, and of an engine that has nothing left to do, which releases those of its caller, too."""
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
