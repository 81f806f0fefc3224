"""Skeleton-of-Thought: outline an answer, then write all of its points at once (arXiv 2307.15337).

sot = SkeletonOfThought(model)  # any LangChain chat model, or "openai:MODEL"
message = await sot.ainvoke("How can I get more done in a day?")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sot_chains.answering.record import PointDelta
    from sot_chains.answering.streams import PointStream
    from sot_chains.calls.prefix_cache import PromptCaching
    from sot_chains.calls.rate_limits import Limits
    from sot_chains.calls.trace import CallTrace, PointTrace, SotTrace
    from sot_chains.calls.usage import Price
    from sot_chains.chain import SkeletonOfThought
    from sot_chains.outline.skeleton import Point, Skeleton, Thought, parse_skeleton
    from sot_chains.prompts.profile import CHINESE, ENGLISH, ModelProfile, Prompts, PromptTemplates
    from sot_chains.providers import (
        DeadlineError,
        Delta,
        Provider,
        ProviderError,
        close_clients,
        make_provider,
    )
    from sot_chains.providers.errors import Retries
    from sot_chains.thought_graph import ThoughtGraph

__all__ = ["CHINESE", "ENGLISH", "CallTrace", "DeadlineError", "Delta", "Limits", "ModelProfile"]
__all__ += ["Point", "PointDelta", "PointStream", "PointTrace", "Price", "PromptCaching"]
__all__ += ["PromptTemplates", "Prompts", "Provider", "ProviderError", "Retries", "Skeleton"]
__all__ += ["SkeletonOfThought", "SotTrace", "Thought", "ThoughtGraph", "close_clients", "make_provider"]
__all__ += ["parse_skeleton"]
__version__ = "0.2.0"
__dir__ = __all__.copy  # for completion
# Where they are. Imported at the first use of a name: LangChain's tracers alone take a second.
_MODULES = """chain thought_graph answering.record answering.streams calls.prefix_cache calls.rate_limits
    calls.trace calls.usage outline.skeleton prompts.profile providers providers.errors"""


def __getattr__(name: str) -> Any:
    for module in _MODULES.split() if name in __all__ else ():
        if name in (found := vars(import_module(f"sot_chains.{module}"))):
            return found[name]
    raise AttributeError(f"module 'sot_chains' has no attribute {name!r}")
