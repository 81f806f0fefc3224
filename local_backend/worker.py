"""The thread that drives an engine while there is work, and sleeps while there is none.

It holds the engine only while working, so an engine nobody refers to is collected and its thread ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol


class Steps(Protocol):
    """What a worker drives."""

    def step(self) -> bool:
        """Do one piece of work; returns whether there is more."""


class Worker:
    """Calls ``step`` on its own daemon thread from :meth:`wake` until it returns false.

    Args:
        steps: Driven, but not kept alive.
        name: Of the thread.
    """

    def __init__(self, steps: Steps, *, name: str) -> None:
        self._steps = weakref.ref(steps)
        self._name = name
        self._condition = threading.Condition()
        self._has_work = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There is work: start the thread or stir it."""
        with self._condition:
            if self._closing:
                raise RuntimeError("the engine is closed; make a new one")
            self._has_work = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify()

    @property
    def is_closing(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closing

    def close(self, timeout_seconds: float = 10.0) -> None:
        """End the thread after the step under way, and wait for it."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._has_work or self._closing):
                    self._condition.wait()
                if self._closing:
                    return
                self._has_work = False
            steps = self._steps()
            if steps is None:
                return
            step: Callable[[], bool] = steps.step
            while not self._closing and step():
                pass
            del steps, step


def on_passing_thread(work: Callable[[], object]) -> None:
    """Run ``work`` on a thread that ends with it, and wait.

    A thread that has once computed in parallel keeps its OpenMP helpers. With those of the engine's thread
    they outnumber the cores, and OpenMP then puts helpers to sleep between any two operations: small models
    become three times slower. The helpers of a thread that has ended are gone.

    Raises:
        Exception: Whatever ``work`` raises.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="local_backend.on_passing_thread", daemon=True)
    thread.start()
    thread.join()
    done.result()
