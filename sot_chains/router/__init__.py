"""Routers decide whether a question takes Skeleton-of-Thought: SoT-R of arXiv 2307.15337, section 4.

Every router is a Runnable from chat input to a :class:`Route`: ``SkeletonOfThought(model,
router=TrainedRouter())``.
"""

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
    "first_certain_of",
]
