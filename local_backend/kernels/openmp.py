"""A thread releases its OpenMP workers when it stops computing.

Torch computes with OpenMP, which gives each thread that has computed in parallel workers of its own, which
wait for its next parallel loop. Up to one a core they spin for a moment; if there are more, GNU's OpenMP puts
them to sleep at once, and waking them up takes longer than a small product: on two cores a model of 135 M
parameters then decodes 40 instead of 75 tokens a second.

Knows threads. Does not know what they compute.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch
from threadpoolctl import ThreadpoolController

T = TypeVar("T")
_HARD = 2  # omp_pause_hard
_SLOW, _PATIENCE, _GAIN = 2.0, 100, 1.3  # times as long; times as long as the try; times as fast
_NUM_RECENT = 3  # forwards; one or two may have been disturbed, or the first of their shape


def release_workers() -> None:
    """End the OpenMP workers of the calling thread, which get new ones with its next parallel loop.

    Takes a microsecond if it has none, and some 50 otherwise. Does nothing with another OpenMP than GNU's.
    """
    for library in _libraries():
        if hasattr(library.dynlib, "omp_pause_resource_all"):  # since OpenMP 5.0, GCC 9
            library.dynlib.omp_pause_resource_all(_HARD)


def set_num_threads(count: int) -> None:
    """Compute on ``count`` threads in the calling thread. After torch's own function attention is slower."""
    torch.get_num_threads()  # sets the number itself at its first call in a thread
    for library in _libraries():
        library.set_num_threads(count)
    if not _libraries():
        torch.set_num_threads(count)


@cache
def _libraries() -> list[Any]:
    return [each for each in ThreadpoolController().lib_controllers if each.prefix == "libgomp"]


def run_in_short_lived_thread(work: Callable[[], object]) -> None:
    """Run ``work`` on a thread whose OpenMP workers end with it, and wait.

    Raises:
        Exception: Whatever ``work`` raises.
    """
    release_workers()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()


class ThreadChoice:
    """Computes forwards on one thread instead of ``most`` while another process keeps a core busy.

    Workers wait, spinning, for one that is not scheduled: with one of two cores busy, a small model takes
    fifteen times as long on two threads as on one. The other number is tried early, and when forwards of a
    kind have become slow, for a hundredth of the time at most.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most = self._count = self._set_count = most
        self._clock, self._next_try, self._best = clock, 0.0, dict[Hashable, float]()  # seconds, by kind
        self._recent = defaultdict[Hashable, deque[float]](lambda: deque(maxlen=_NUM_RECENT))

    def run(self, kind: Hashable, forward: Callable[[], T]) -> T:
        """The result of ``forward``, which takes as long as others of its ``kind`` on as many threads."""
        started, recent = self._clock(), self._recent[kind]
        is_due = len(recent) == _NUM_RECENT and started >= self._next_try
        is_slow = is_due and (self._count < self._most or min(recent) > _SLOW * self._best[kind])
        is_try = is_slow or (is_due and self._next_try == 0)
        other = 1 if self._count == self._most else self._most
        if (wanted := other if is_try else self._count) != self._set_count:
            set_num_threads(wanted)
            self._set_count = wanted
        result = forward()
        seconds = self._clock() - started
        if is_try:
            self._next_try = started + _PATIENCE * seconds
        needed = _GAIN if self._set_count < self._most else 1.0  # rounding may differ: not for nothing
        if not is_try or seconds * needed < min(recent):
            self._count = self._set_count
            recent.append(seconds)
            self._best[kind] = min(seconds, self._best.get(kind, seconds))
        return result
