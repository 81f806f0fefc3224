"""Routes, and routers that wrap others: the first certain one, and one that checks the load."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, patch_config

from sot_chains.aio.blocking import BlockingRunnable
from sot_chains.prompts.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Route:
    """A router's decision for one question.

    Attributes:
        use_sot: Whether to use Skeleton-of-Thought; otherwise the model answers plainly.
        reason: The reason, for people to read.
        confidence: How sure the router is of ``use_sot``, from 0 (no idea) to 1 (certain).
        router: The name of the router that decided.
        is_graph: Whether points build on each other: the outline may mark what they need, and the answer has
            a conclusion.
    """

    use_sot: bool
    reason: str
    confidence: float
    router: str
    is_graph: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.confidence <= 1.0:
            raise ValueError(f"confidence must be from 0 to 1, got {self.confidence}")


class Router(BlockingRunnable[LanguageModelInput, Route]):
    """Decides whether a question is answered by Skeleton-of-Thought.

    A subclass implements :meth:`adecide`. All Runnable methods then work, and routers can be combined with
    :func:`~sot_chains.router.first_certain_of` and
    :class:`~sot_chains.router.route.LoadAwareRouter`.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        """The route of ``conversation``, whose last human message is the question."""

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Route:
        """The route of ``input``.

        Raises:
            ValueError: ``input`` has no question.
            TypeError: ``input`` is not the input of a chat model.
        """

        async def decide(
            question: LanguageModelInput,
            run_manager: AsyncCallbackManagerForChainRun,
            config: RunnableConfig,
        ) -> Route:
            config = patch_config(config, callbacks=run_manager.get_child())
            return await self.adecide(Conversation.of(question), config)

        return await self._acall_with_config(decide, input, ensure_config(config))


class FirstCertainOf(Router):
    """A router that asks ``routers`` in turn and takes the first route that is certain.

    Put cheap ones first: ``first_certain_of(RulesRouter(), TrainedRouter(), PromptedRouter(model))`` calls
    the model only for questions that the rules and the classifier leave open. If none is certain, the most
    confident decides.

    Args:
        *routers: At least one.
        certain: Minimum confidence to take a route without asking the next router.

    Raises:
        ValueError: There is no router, or ``certain`` is not from 0 to 1.
    """

    def __init__(self, *routers: Runnable[LanguageModelInput, Route], certain: float = 0.9) -> None:
        if not routers:
            raise ValueError("give at least one router")
        if not 0.0 <= certain <= 1.0:
            raise ValueError(f"certain must be from 0 to 1, got {certain}")
        self._routers = routers
        self._certain = certain

    def __repr__(self) -> str:
        return f"first_certain_of({', '.join(map(repr, self._routers))}, certain={self._certain})"

    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        """Asks in order; if none is certain, the most confident decides, the later one among equals."""
        routes: list[Route] = []
        for router in self._routers:
            routes.append(await router.ainvoke(list(conversation.messages), config))
            if routes[-1].confidence >= self._certain:
                return routes[-1]
        return max(reversed(routes), key=lambda route: route.confidence)


first_certain_of = FirstCertainOf


@runtime_checkable
class Load(Protocol):
    """A service that knows how many more requests it can take."""

    @property
    def num_free(self) -> float:
        """Requests that could start now without waiting; negative while others are waiting."""
        ...


class LoadAwareRouter(Router):
    """Lets another router decide, but answers plainly while the service is busy.

    Args:
        load: The service, such as an engine or the limiter of a chain.
        router: Decides while there is capacity; by default all questions take Skeleton-of-Thought.
        num_needed: Free requests needed, about as many as an answer has points. A higher number leaves room
            for further questions.
        num_points: Expected number of requests per answer once its skeleton exists.
        outline_seconds: Expected time until then. The load does not show these requests earlier, so this
            router counts them: of many questions at once, only the first take Skeleton-of-Thought.

    Raises:
        ValueError: ``num_needed`` is below 1.
        TypeError: ``load`` has no property ``num_free``.
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
        self._promised: deque[float] = deque()  # start times of answers that have no skeleton yet

    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        """Checks the load first; while the service is busy, the other router is not asked."""
        num_free = self.num_free()
        if num_free < self._num_needed:
            reason = f"the service is busy: {max(num_free, 0):g} requests free, {self._num_needed} needed"
            return Route(False, reason, 1.0, "load-aware")
        reason = f"the service has room: {num_free:g} requests free, {self._num_needed} needed"
        route = Route(True, reason, 1.0, "load-aware")
        if self._router is not None:
            route = await self._router.ainvoke(list(conversation.messages), config)
        if route.use_sot:
            self._promised.append(time.monotonic())
        return route

    def num_free(self) -> float:
        """Free requests, minus those reserved for answers that have no skeleton yet."""
        latest = time.monotonic() - self._outline_seconds
        while self._promised and self._promised[0] < latest:
            self._promised.popleft()
        return self._load.num_free - self._num_points * len(self._promised)
