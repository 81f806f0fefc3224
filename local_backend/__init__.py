"""A decoding engine over ``transformers`` models: draft -> verify -> accept -> commit, losslessly.

Needs the ``local`` extra (torch). Names are imported on first use, so importing the package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from local_backend.drafting import Combined, Drafter, Jacobi, Lookahead, ReferenceCopy
    from local_backend.drafting.draft import Draft, Outcome
    from local_backend.engine.engine import Engine
    from local_backend.langchain.chat_local import ChatLocal
    from local_backend.models.files import find_model
    from local_backend.scheduling.lengths import Scheduling
    from local_backend.sequences.outputs import Completion
    from local_backend.sequences.request import References
    from local_backend.sequences.sampling import SamplingParams
    from local_backend.transformers.generate import ParallelDecoding

__all__ = ["ChatLocal", "Combined", "Completion", "Draft", "Drafter", "Engine", "Jacobi", "Lookahead"]
__all__ += ["Outcome", "ParallelDecoding", "ReferenceCopy", "References", "SamplingParams", "Scheduling"]
__all__ += ["find_model"]
__version__ = "0.2.0"

_HOMES = {
    "drafting": ("Combined", "Drafter", "Jacobi", "Lookahead", "ReferenceCopy"),
    "drafting.draft": ("Draft", "Outcome"),
    "engine.engine": ("Engine",),
    "langchain.chat_local": ("ChatLocal",),
    "transformers.generate": ("ParallelDecoding",),
    "models.files": ("find_model",),
    "sequences.outputs": ("Completion",),
    "sequences.request": ("References",),
    "sequences.sampling": ("SamplingParams",),
    "scheduling.lengths": ("Scheduling",),
}


def __getattr__(name: str) -> object:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == __name__:
            raise
        message = f"local_backend needs {error.name}: pip install '.[local]' in a checkout"
        raise ImportError(message) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
