"""A thread releases its OpenMP workers when it stops computing.

Torch computes with OpenMP, which gives each thread that has computed in parallel workers of its own; they
wait for its next parallel loop. If there are no more workers than cores, GNU's OpenMP lets them spin for a
moment between two operations. If there are more, it puts them to sleep at once, and waking them up takes
longer than a small product: on two cores a model of 135 M parameters then decodes 40 instead of 75 tokens a
second, although all but two of the threads do nothing.

Knows threads. Does not know what they compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from threadpoolctl import threadpool_info

_HARD = 2  # omp_pause_hard


def release_workers() -> None:
    """End the OpenMP workers of the calling thread, which get new ones with its next parallel loop.

    Takes a microsecond if it has none, and some 50 otherwise. Does nothing with another OpenMP than GNU's.
    """
    for pause in _pauses():
        pause(_HARD)


@cache
def _pauses() -> list[Any]:
    found = [library["filepath"] for library in threadpool_info() if library["prefix"] == "libgomp"]
    pauses = [getattr(ctypes.CDLL(path), "omp_pause_resource_all", None) for path in found]
    return [pause for pause in pauses if pause is not None]  # there is one since OpenMP 5.0, GCC 9


def run_in_short_lived_thread(work: Callable[[], object]) -> None:
    """Run ``work`` on a thread whose OpenMP workers end with it, and wait.

    Raises:
        Exception: Whatever ``work`` raises.
    """
    release_workers()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()
