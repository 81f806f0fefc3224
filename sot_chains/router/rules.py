"""The rules router: recognises clear cases with patterns, without a classifier or a model.

Every rule chooses the plain answer, where that is certain; if none applies, the next router is asked.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files

from langchain_core.runnables import RunnableConfig

from sot_chains.prompts.conversation import Conversation
from sot_chains.router.route import Route, Router

CERTAIN = 0.97

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
    flags = re.IGNORECASE | re.DOTALL
    found = {reason: re.compile(pattern, flags).search for reason, pattern in patterns.items()}
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
