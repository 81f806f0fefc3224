"""Skeleton-of-Thought: outline an answer, then write all of its points at once (arXiv 2307.15337).

sot = SkeletonOfThought(model)  # any LangChain chat model, or "openai:MODEL"
message = await sot.ainvoke("How do I get more done in a day?")
"""

from sot_chains.answer import PointDelta
from sot_chains.chain import SkeletonOfThought
from sot_chains.point_stream import PointStream
from sot_chains.prompts import CHINESE, ENGLISH, Prompts, PromptTemplates
from sot_chains.providers import Delta, Provider, ProviderError, provider_of
from sot_chains.skeleton import Point, Skeleton, parse_skeleton
from sot_chains.trace import CallTrace, PointTrace, SotTrace

__all__ = [
    "CHINESE",
    "ENGLISH",
    "CallTrace",
    "Delta",
    "Point",
    "PointDelta",
    "PointStream",
    "PointTrace",
    "PromptTemplates",
    "Prompts",
    "Provider",
    "ProviderError",
    "Skeleton",
    "SkeletonOfThought",
    "SotTrace",
    "parse_skeleton",
    "provider_of",
]
