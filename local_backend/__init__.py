"""A decoding engine over ``transformers`` models: draft -> verify -> accept -> commit, losslessly.

Needs the ``local`` extra (torch). The names below are imported on first use, so importing the package is
cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from local_backend.drafting import (
        Combined,
        Drafter,
        Jacobi,
        Lookahead,
        ReferenceCopy,
        SpanCopy,
    )
    from local_backend.drafting.draft import Draft, Outcome
    from local_backend.engine.engine import Engine
    from local_backend.integrations.chat_local import ChatLocal
    from local_backend.integrations.custom_generate import ParallelDecoding, write_custom_generate
    from local_backend.requests.outputs import Completion
    from local_backend.requests.request import References
    from local_backend.requests.sampling import SamplingParams
    from local_backend.scheduling.lengths import Scheduling

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
    "ChatLocal": "integrations.chat_local",
    "Combined": "drafting",
    "Completion": "requests.outputs",
    "Draft": "drafting.draft",
    "Drafter": "drafting",
    "Engine": "engine.engine",
    "Jacobi": "drafting",
    "Lookahead": "drafting",
    "Outcome": "drafting.draft",
    "ParallelDecoding": "integrations.custom_generate",
    "ReferenceCopy": "drafting",
    "References": "requests.request",
    "SamplingParams": "requests.sampling",
    "Scheduling": "scheduling.lengths",
    "SpanCopy": "drafting",
    "write_custom_generate": "integrations.custom_generate",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("local_backend needs torch: pip install '.[local]' in a checkout") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
