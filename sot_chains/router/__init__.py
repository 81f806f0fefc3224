"""Routers decide whether a question takes Skeleton-of-Thought: SoT-R of arXiv 2307.15337, section 4.

Every router is a Runnable from chat input to a :class:`Route`: ``SkeletonOfThought(model,
router=TrainedRouter())``.
"""

from functools import cache
from typing import Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable

from sot_chains.router.prompted import PromptedRouter
from sot_chains.router.route import FirstCertainOf, Load, LoadAwareRouter, Route, Router, first_certain_of
from sot_chains.router.rules import RULES, Rule, RulesRouter
from sot_chains.router.trained import Head, TrainedRouter

__all__ = [
    "RULES",
    "FirstCertainOf",
    "Head",
    "Load",
    "LoadAwareRouter",
    "PromptedRouter",
    "Route",
    "Router",
    "Rule",
    "RulesRouter",
    "TrainedRouter",
    "auto_router",
    "first_certain_of",
    "router_of",
]


@cache
def auto_router() -> Router:
    """The router that chains use unless told otherwise: the rules, then the classifier that ships."""
    return first_certain_of(RulesRouter(), TrainedRouter())


def router_of(
    router: Runnable[LanguageModelInput, Any] | Literal["auto"] | None,
) -> Runnable[LanguageModelInput, Any] | None:
    """The router meant by the argument ``router`` of a chain.

    Raises:
        TypeError: It is none.
    """
    if isinstance(router, str) and router == "auto":
        return auto_router()
    if router is None or isinstance(router, Runnable):
        return router
    raise TypeError(f'router must be a Runnable, "auto" or None, got {router!r}')
