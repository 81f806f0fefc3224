"""A decoding engine over ``transformers`` models: draft -> verify -> accept -> commit, losslessly.

Needs the ``local`` extra (torch). The names below are loaded when first used, so that importing the package
costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from local_backend.chat_model import ChatLocal
    from local_backend.custom_generate import ParallelDecoding, write_custom_generate
    from local_backend.draft import Draft, Outcome
    from local_backend.drafters import (
        Combined,
        Drafter,
        Jacobi,
        Lookahead,
        ReferenceCopy,
        SpanCopy,
    )
    from local_backend.engine import Engine
    from local_backend.references import References
    from local_backend.sampling import SamplingParams
    from local_backend.scheduling.options import Scheduling
    from local_backend.sequence import Completion

__all__ = [
    "ChatLocal",
    "Combined",
    "Completion",
    "Draft",
    "Drafter",
    "Engine",
    "Jacobi",
    "Lookahead",
    "Outcome",
    "ParallelDecoding",
    "ReferenceCopy",
    "References",
    "SamplingParams",
    "Scheduling",
    "SpanCopy",
    "write_custom_generate",
]

_HOMES = {
    "ChatLocal": "chat_model",
    "Combined": "drafters",
    "Completion": "sequence",
    "Draft": "draft",
    "Drafter": "drafters",
    "Engine": "engine",
    "Jacobi": "drafters",
    "Lookahead": "drafters",
    "Outcome": "draft",
    "ParallelDecoding": "custom_generate",
    "ReferenceCopy": "drafters",
    "References": "references",
    "SamplingParams": "sampling",
    "Scheduling": "scheduling.options",
    "SpanCopy": "drafters",
    "write_custom_generate": "custom_generate",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            "local_backend needs torch: pip install 'langchain-parallel-decoding[local]'"
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
