"""Routes, the base of all routers, and the router that asks others in turn."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, patch_config

from sot_chains.aio.blocking import BlockingRunnable
from sot_chains.prompts.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Route:
    """A router's decision for one question."""

    use_sot: bool  # whether to use Skeleton-of-Thought; otherwise the model answers plainly
    reason: str  # for people to read
    confidence: float  # of use_sot, from 0 (no idea) to 1 (certain)
    router: str  # the name of the router that decided
    is_graph: bool = False  # points may build on each other, and the answer has a conclusion

    def __post_init__(self) -> None:
        if not 0.0 <= self.confidence <= 1.0:
            raise ValueError(f"confidence must be from 0 to 1, got {self.confidence}")


class Router(BlockingRunnable[LanguageModelInput, Route]):
    """Decides whether a question is answered by Skeleton-of-Thought.

    A subclass implements :meth:`adecide`. All Runnable methods then work, and routers can be combined with
    :func:`~sot_chains.router.first_certain_of`.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        """The route of ``conversation``, whose last human message is the question."""

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Route:
        """The route of ``input``."""

        async def decide(
            question: LanguageModelInput, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig
        ) -> Route:
            config = patch_config(config, callbacks=run_manager.get_child())
            return await self.adecide(Conversation.of(question), config)

        return await self._acall_with_config(decide, input, ensure_config(config))


class FirstCertainOf(Router):
    """A router that asks ``routers`` in turn and takes the first route that is certain.

    Put cheap ones first: ``first_certain_of(RulesRouter(), TrainedRouter(), PromptedRouter(model))`` calls
    the model only for questions that the rules and the classifier leave open. If none is certain, the most
    confident decides.

    A route is certain whose confidence is at least ``certain``.
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
