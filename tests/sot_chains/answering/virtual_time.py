"""An event loop whose clock jumps: half an hour of waiting is over at once, and the same each time."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits and nothing will come")
            self.now += max(timeout, 1e-6)
        return ready


def run(work: Coroutine[Any, Any, T], monkeypatch: pytest.MonkeyPatch) -> T:
    """Runs ``work``; ``time.monotonic`` and ``asyncio.sleep`` go by the jumping clock."""
    selector = _JumpingSelector()
    monkeypatch.setattr(time, "monotonic", lambda: selector.now)
    loop = asyncio.SelectorEventLoop(selector)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        monkeypatch.undo()
