"""Skeleton-of-Thought in agents of LangChain 1.x; needs the package ``langchain``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.language_models import BaseChatModel

from sot_chains.aio.blocking import run
from sot_chains.chain import SkeletonOfThought


class SkeletonMiddleware(AgentMiddleware[Any, Any, Any]):
    """Has an agent's answers written by points, where the router takes the question for one of that kind.

    The model is asked with its tools first, and tool calls are passed on as they come; see
    :class:`~sot_chains.answering.chat_model.SkeletonChatModel`. Turns that do not follow a question of the
    user, questions that the router takes otherwise and answers with a schema are left to the agent's model
    as they are. Put it last, so that other middleware sees that model.

    Args:
        words_before_calls: How many words the model may write before it calls a tool.
        **options: Arguments of :class:`~sot_chains.SkeletonOfThought`, e.g. ``router``, ``profile``.
    """

    def __init__(self, *, words_before_calls: int = 30, **options: Any) -> None:
        self._words_before_calls = words_before_calls
        self._options = options
        self._latest: tuple[BaseChatModel, SkeletonOfThought] | None = None  # what a chain learns is kept

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Answers one turn of the agent."""
        return handler(run(lambda: self._with_points(request)))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """Answers one turn of the agent."""
        return await handler(await self._with_points(request))

    async def _with_points(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        if request.response_format is not None:
            return request
        if self._latest is None or self._latest[0] is not request.model:
            self._latest = request.model, SkeletonOfThought(request.model, **self._options)
        model = self._latest[1].as_chat_model()
        model.words_before_calls = self._words_before_calls
        system = [request.system_message] if request.system_message else []
        is_for_points = await model.takes_points([*system, *request.messages])
        return request.override(model=model) if is_for_points else request
