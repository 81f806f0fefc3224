"""Routers decide whether a question takes Skeleton-of-Thought: SoT-R of arXiv 2307.15337, section 4.

Every router is a Runnable from chat input to a :class:`Route`.
"""

from functools import cache
from typing import Literal

from langchain_core.runnables import Runnable

from sot_chains.calls.options import Routing
from sot_chains.router.route import PromptedRouter, Route, Router, RulesRouter, first_certain_of
from sot_chains.router.trained import TrainedRouter

__all__ = ["PromptedRouter", "Route", "Router", "RulesRouter", "TrainedRouter", "auto_router"]
__all__ += ["first_certain_of", "make_router"]


@cache
def auto_router() -> Router:
    """The default router: the rules, then the classifier that ships."""
    return first_certain_of(RulesRouter(), TrainedRouter())


def make_router(router: Routing | Literal["auto"]) -> Routing:
    """The router meant by the argument ``router`` of a chain, or what is done without one."""
    if isinstance(router, Runnable) or router in ("always", "unless_busy", "never"):
        return router
    if router != "auto":
        words = '"auto", "always", "unless_busy" or "never"'
        raise ValueError(f"router must be a Runnable, {words}, got {router!r}")
    return auto_router()
