"""A limit for a whole benchmark, shared among its parts: what was measured by then is its result."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class TimeIsUp(KeyboardInterrupt):
    """The benchmark's time is used up. Like Ctrl-C, it passes event loops and handlers of ``Exception``."""


@dataclass
class Clock:
    """Shares what is left of the time among the parts that are left."""

    deadline: float
    num_parts: int

    def next_share(self) -> float:
        """Seconds for the next part."""
        left, self.num_parts = self.num_parts, self.num_parts - 1
        return (self.deadline - time.perf_counter()) / max(1, left)

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Raises :class:`TimeIsUp` at the deadline, and ends the block quietly then."""

        def stop(*_: object) -> None:
            raise TimeIsUp

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, self.deadline - time.perf_counter()))
        try:
            yield
        except TimeIsUp:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
