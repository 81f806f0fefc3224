"""Synchronous calls on the background loop."""

import asyncio
import contextvars
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from queue import SimpleQueue

import pytest

from sot_chains.aio import blocking
from tests.sot_chains.fakes import QUESTION, PacedChatModel, sot_of

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


async def read_variable() -> str:
    return variable.get()


def test_the_callers_context_is_carried_along() -> None:
    variable.set("set")
    assert blocking.run(read_variable) == "set"


def test_all_calls_share_one_loop() -> None:
    async def loop() -> int:
        return id(asyncio.get_running_loop())

    assert blocking.run(loop) == blocking.run(loop)


def test_errors_come_back() -> None:
    async def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        blocking.run(fail)

    async def some() -> AsyncGenerator[int, None]:
        yield 1
        raise KeyError("mine")

    items = blocking.iterate(some)
    assert next(items) == 1
    with pytest.raises(KeyError, match="mine"):
        next(items)


def test_a_synchronous_call_on_the_background_loop_itself_is_refused() -> None:
    async def nested() -> None:
        sot_of(PacedChatModel()).invoke(QUESTION)

    with pytest.raises(RuntimeError, match="use the awaitable method"):
        blocking.run(nested)


def test_an_interrupt_cancels_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    class Interrupted(SimpleQueue[None]):
        """A queue whose first wait is interrupted once the work has begun."""

        is_first = True

        def get(self, block: bool = True, timeout: float | None = None) -> None:
            if self.is_first:
                self.is_first = False
                started.wait()
                raise KeyboardInterrupt
            super().get(block, timeout)

    monkeypatch.setattr(blocking, "SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        blocking.run(work)
    assert cancelled.is_set()


def test_a_process_that_called_synchronously_ends_quietly() -> None:
    code = (
        "from tests.sot_chains.fakes import *; from sot_chains import SkeletonOfThought;"
        "print(SkeletonOfThought(PacedChatModel()).invoke(QUESTION).content == ANSWER)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
