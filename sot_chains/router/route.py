"""Routes, and routers made of others: the first that is certain, and one that looks at the load."""

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

from sot_chains.providers import blocking
from sot_chains.text.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Route:
    """How a question is to be answered.

    Attributes:
        use_sot: Whether by Skeleton-of-Thought; plainly otherwise.
        reason: Why, in words for people.
        confidence: How sure the router is of ``use_sot``, from 0 (has no idea) to 1 (certain).
        router: The name of the router that decided.
    """

    use_sot: bool
    reason: str
    confidence: float
    router: str

    def __post_init__(self) -> None:
        if not 0.0 <= self.confidence <= 1.0:
            raise ValueError(f"confidence must be from 0 to 1, got {self.confidence}")


class Router(Runnable[LanguageModelInput, Route]):
    """Decides whether a question is answered by Skeleton-of-Thought.

    A subclass gives :meth:`adecide`. Every way of calling a Runnable then works, and a router composes with
    others by :func:`~sot_chains.router.first_certain_of` and
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
        """Decides on ``input``.

        Raises:
            ValueError: There is no question in it.
            TypeError: It is not what a chat model takes.
        """

        async def decide(
            question: LanguageModelInput,
            run_manager: AsyncCallbackManagerForChainRun,
            config: RunnableConfig,
        ) -> Route:
            config = patch_config(config, callbacks=run_manager.get_child())
            return await self.adecide(Conversation.of(question), config)

        return await self._acall_with_config(decide, input, ensure_config(config))

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> Route:
        """Decides on ``input``; see :meth:`ainvoke`."""
        return blocking.run(lambda: self.ainvoke(input, config, **kwargs))


class FirstCertainOf(Router):
    """See :func:`first_certain_of`."""

    def __init__(self, routers: tuple[Runnable[LanguageModelInput, Route], ...], certain: float) -> None:
        if not routers:
            raise ValueError("give at least one router")
        if not 0.0 <= certain <= 1.0:
            raise ValueError(f"certain must be from 0 to 1, got {certain}")
        self._routers = routers
        self._certain = certain

    def __repr__(self) -> str:
        return f"first_certain_of({', '.join(map(repr, self._routers))}, certain={self._certain})"

    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        """Asks in order; where none is certain, the surest of them decides, the later one among equals."""
        surest: Route | None = None
        for router in self._routers:
            route = await router.ainvoke(list(conversation.messages), config)
            if route.confidence >= self._certain:
                return route
            if surest is None or route.confidence >= surest.confidence:
                surest = route
        assert surest is not None
        return surest


def first_certain_of(*routers: Runnable[LanguageModelInput, Route], certain: float = 0.9) -> FirstCertainOf:
    """A router that asks ``routers`` in turn and takes the first route that is certain.

    Put cheap ones first: ``first_certain_of(RulesRouter(), TrainedRouter(), PromptedRouter(model))`` calls
    the model only about questions that patterns and classifier leave open. Where none is certain, the
    surest decides.

    Args:
        *routers: At least one.
        certain: The confidence from which a route is taken without asking further.

    Raises:
        ValueError: There is no router, or ``certain`` is not a share.
    """
    return FirstCertainOf(routers, certain)


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
