"""Routers asked one after another, until one is certain."""

from __future__ import annotations

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable, RunnableConfig

from sot_chains.conversation import Conversation
from sot_chains.router.route import Route, Router


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
