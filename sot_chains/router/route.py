"""Routes, the base of all routers, and those that need no training: in turn, by rules, by asking a model.

Asking a model is the paper's method (arXiv 2307.15337, section 4.1: a three-way question before the answer),
in our own words.
"""

from __future__ import annotations

import re
import tomllib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import HumanMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, patch_config

from sot_chains.aio.blocking import BlockingRunnable
from sot_chains.prompts.conversation import Conversation
from sot_chains.prompts.profile import language_of, load_data
from sot_chains.providers import Provider, make_provider


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

CERTAIN, CONFIDENCE = 0.97, 0.9  # of a rule, and of a model's reply
Rules = Mapping[str, Callable[[str], object]]  # whether each applies, by reason for a plain answer

_ARITHMETIC = re.compile(r"\d\s*(?:[-+*/×÷^=]|\*\*)\s*[-(]?\s*\d")
_OTHER_WORDS = re.compile(r"[^\W\d_]{2,}")


def _is_arithmetic(question: str) -> bool:
    return bool(_ARITHMETIC.search(question)) and len(_OTHER_WORDS.findall(question)) <= 6


def _load_rules() -> Rules:
    wording = tomllib.loads(files("sot_chains.router").joinpath("rules.toml").read_text("utf-8"))
    patterns = {
        reason: "|".join(alternatives).replace("<please>", wording["please"])
        for reason, alternatives in wording["reasons"].items()
    }
    found = {reason: re.compile(pattern, re.I | re.S).search for reason, pattern in patterns.items()}
    return {**found, "it is arithmetic": _is_arithmetic}


RULES = _load_rules()


class RulesRouter(Router):
    """Recognises questions that do not suit Skeleton-of-Thought: code, arithmetic, translations and the like.

    The first of ``rules`` that applies decides.

    Example:
        >>> RulesRouter().invoke("Translate 'good night' into Dutch.").reason
        'it wants a translation'
    """

    def __init__(self, rules: Rules = RULES) -> None:
        self._rules = rules

    def decide(self, question: str) -> Route:
        """The route of a question's text; its confidence is 0 if no rule applies."""
        question = question.strip()
        for reason, applies in self._rules.items():
            if applies(question):
                return Route(False, reason, CERTAIN, "rules")
        return Route(True, "no rule applies", 0.0, "rules")

    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        """See :meth:`decide`."""
        return self.decide(conversation.question)


_REQUESTS = {language: load_data(language)["router"]["request"] for language in ("en", "zh")}
_REASONS = load_data("en")["router"]["reasons"]
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
