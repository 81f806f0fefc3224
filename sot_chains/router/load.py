"""The load-aware router: Skeleton-of-Thought only while what it adds is cheap.

An answer by Skeleton-of-Thought is several requests where a plain one is one. While there are rows or
requests to spare they cost nothing and save time; once there are none, they make everybody wait. Knows how
much is free, by a protocol; does not know engines or limits.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol, runtime_checkable

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable, RunnableConfig

from sot_chains.conversation import Conversation
from sot_chains.router.route import Route, Router


@runtime_checkable
class Load(Protocol):
    """Something that serves requests and knows how many more it can take."""

    @property
    def num_free(self) -> float:
        """Requests that could be begun now without waiting; negative while others wait already."""
        ...


class LoadAwareRouter(Router):
    """Lets another router decide, but answers plainly while the service is busy.

    Args:
        load: What serves the requests, such as an engine or the limiter of a chain.
        router: Decides while there is room; all questions take Skeleton-of-Thought by default.
        num_needed: How many requests must be free: about as many as an answer has points. More of them leave
            room for questions that are about to come.
        num_points: Requests an answer is expected to become once its outline is there.
        outline_seconds: How long that takes. Until then they are not seen in the load, so this router counts
            them itself: of many questions that come at once only the first take Skeleton-of-Thought.

    Raises:
        ValueError: ``num_needed`` is below 1.
        TypeError: ``load`` does not say what is free.
    """

    def __init__(
        self,
        load: Load,
        router: Runnable[LanguageModelInput, Route] | None = None,
        *,
        num_needed: int = 8,
        num_points: int = 8,
        outline_seconds: float = 1.0,
    ) -> None:
        if num_needed < 1:
            raise ValueError(f"num_needed must be at least 1, got {num_needed}")
        if not isinstance(load, Load):
            raise TypeError(f"load must have a property num_free, got {type(load).__name__}")
        self._load = load
        self._router = router
        self._num_needed = num_needed
        self._num_points = num_points
        self._outline_seconds = outline_seconds
        self._promised: deque[float] = deque()  # when answers were let through that are still outlined

    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        """Looks at the load first: a busy service is not asked whether it would have liked to."""
        num_free = self.num_free()
        if num_free < self._num_needed:
            reason = f"the service is busy: {max(num_free, 0):g} requests free, {self._num_needed} needed"
            return Route(False, reason, 1.0, "load-aware")
        if self._router is None:
            reason = f"the service has room: {num_free:g} requests free, {self._num_needed} needed"
            route = Route(True, reason, 1.0, "load-aware")
        else:
            route = await self._router.ainvoke(list(conversation.messages), config)
        if route.use_sot:
            self._promised.append(time.monotonic())
        return route

    def num_free(self) -> float:
        """Requests that are free and not promised to answers still being outlined."""
        latest = time.monotonic() - self._outline_seconds
        while self._promised and self._promised[0] < latest:
            self._promised.popleft()
        return self._load.num_free - self._num_points * len(self._promised)
