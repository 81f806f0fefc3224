"""The prompted router: asks a chat model what kind of answer a question wants.

The paper's method (arXiv 2307.15337, section 4.1: a three-way question before the answer), in our own words.
"""

from __future__ import annotations

import re
from contextlib import aclosing
from typing import Any, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import HumanMessage
from langchain_core.runnables import Runnable, RunnableConfig

from sot_chains.prompts.conversation import Conversation
from sot_chains.prompts.templates import language_of, load_wording
from sot_chains.providers import Provider, make_provider
from sot_chains.router.route import Route, Router

CONFIDENCE = 0.9

_REQUESTS = {language: load_wording(language)["router"]["request"] for language in ("en", "zh")}
_REASONS = {
    "A": "the model sees independent points in a good answer",
    "B": "the model sees steps that build on one another",
    "C": "the model sees an answer of one piece",
}
# The letter alone at the start, or named as the answer, since "A" also starts English sentences.
_LETTER = re.compile(
    r"^\W*([ABC])(?:[\s.,:;)\]*。，：]*$|[.):*。：]|\s*[-\u2013\u2014]\s)"
    r"|(?:answer|form|letter|reply|option|答案|选择|选)(?: is|是|为)?\W{0,4}([ABC])\b"
)
_MAX_REPLY_CHARACTERS = 400


def read_letter(reply: str) -> str | None:
    """The letter in ``reply``, ``"A"``, ``"B"`` or ``"C"``; ``None`` if none is clearly given."""
    match = _LETTER.search(reply.strip())
    return (match[1] or match[2]) if match else None


class PromptedRouter(Router):
    """Asks a model whether a question suits Skeleton-of-Thought.

    Args:
        model: Any model that :class:`~sot_chains.chain.SkeletonOfThought` takes; a small one is enough.
        graphs: Whether answers whose steps build on each other (B) are written as a graph of points, each
            once those are written that it needs; otherwise such questions are answered plainly.
        **options: Options of a model given by name.

    Example:
        >>> from langchain_core.language_models import FakeListChatModel
        >>> PromptedRouter(FakeListChatModel(responses=["B"])).invoke("Solve 3x = 9.").use_sot
        False
    """

    def __init__(
        self,
        model: str | Runnable[LanguageModelInput, Any] | Provider,
        *,
        graphs: bool = False,
        **options: Any,
    ) -> None:
        self._provider = make_provider(model, **options)
        self._graphs = graphs

    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        """Asks the model."""
        letter = await self._ask(conversation.question, config)
        if letter is None:
            return Route(False, "the model's reply was none of A, B and C", 0.0, "prompted")
        is_graph = self._graphs and letter == "B"
        return Route(letter == "A" or is_graph, _REASONS[letter], CONFIDENCE, "prompted", is_graph)

    async def _ask(self, question: str, config: RunnableConfig) -> str | None:
        # Not str.format: questions may contain braces.
        request = HumanMessage(_REQUESTS[language_of(question)].replace("{question}", question))
        reply = ""
        deltas = self._provider.stream([request], config={**config, "run_name": "router"})
        async with aclosing(cast("Any", deltas)):
            async for delta in deltas:
                reply += delta.text
                if len(reply) > _MAX_REPLY_CHARACTERS:
                    break  # the model answers the question instead
        return read_letter(reply)

    def __repr__(self) -> str:
        return f"PromptedRouter({self._provider.model_name!r})"
