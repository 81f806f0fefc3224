"""What a router decides, and what all routers share: they are Runnables from chat input to a ``Route``.

Knows questions and decisions. Does not know how any router comes to its decision.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, patch_config

from sot_chains import background
from sot_chains.conversation import Conversation


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
    :class:`~sot_chains.router.load.LoadAwareRouter`.
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
        return background.run(lambda: self.ainvoke(input, config, **kwargs))
