"""Consistency training: a model learns to land many tokens a forward under Jacobi decoding.

Trajectories of the model's own decoding (:class:`StoredTrajectories`), losses that pull its word on a guess
to its word on the fixed point, a trainer on top of ``transformers.Trainer``, and measures of speed and
quality before and after. ``python -m local_backend.training tune`` does all of it, and so does :func:`tune`.

Needs the ``training`` extra (datasets, peft, matplotlib). Nothing else of the package imports this one, and
the names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from local_backend.training.evaluation import Evaluation, evaluate, perplexity
    from local_backend.training.examples import NoisyExamples, Trajectory
    from local_backend.training.identity import fingerprint
    from local_backend.training.losses import (
        autoregressive_loss,
        global_consistency_loss,
        local_consistency_loss,
    )
    from local_backend.training.masks import PackedForward
    from local_backend.training.noise import NoiseOptions
    from local_backend.training.options import TuneOptions
    from local_backend.training.packing import Copy, Example, PackedBatch, pack
    from local_backend.training.pictures import draw_progress, draw_trajectories
    from local_backend.training.pipeline import Report, tune
    from local_backend.training.prompts import read_prompts
    from local_backend.training.rounds import load_for_training, train_round
    from local_backend.training.stored import StoredTrajectories
    from local_backend.training.trainer import ConsistencyTrainer, LossOptions, packed_losses
    from local_backend.training.trajectories import (
        CollectOptions,
        Recorder,
        collect_trajectories,
        decode_recorded,
    )

_HOMES = {
    "CollectOptions": "trajectories",
    "ConsistencyTrainer": "trainer",
    "Copy": "packing",
    "Evaluation": "evaluation",
    "Example": "packing",
    "LossOptions": "trainer",
    "NoiseOptions": "noise",
    "NoisyExamples": "examples",
    "PackedBatch": "packing",
    "PackedForward": "masks",
    "Recorder": "trajectories",
    "Report": "pipeline",
    "StoredTrajectories": "stored",
    "Trajectory": "examples",
    "TuneOptions": "options",
    "autoregressive_loss": "losses",
    "collect_trajectories": "trajectories",
    "decode_recorded": "trajectories",
    "draw_progress": "pictures",
    "draw_trajectories": "pictures",
    "evaluate": "evaluation",
    "fingerprint": "identity",
    "global_consistency_loss": "losses",
    "load_for_training": "rounds",
    "local_consistency_loss": "losses",
    "pack": "packing",
    "packed_losses": "trainer",
    "perplexity": "evaluation",
    "read_prompts": "prompts",
    "train_round": "rounds",
    "tune": "pipeline",
}
# Of the `training` extra, or of the `local` one that it contains.
_EXTRA = ("torch", "accelerate", "datasets", "peft", "matplotlib")
_NEED_TORCH_ALONE = {"examples", "losses", "masks", "noise", "packing"}

__all__ = [
    "CollectOptions",
    "ConsistencyTrainer",
    "Copy",
    "Evaluation",
    "Example",
    "LossOptions",
    "NoiseOptions",
    "NoisyExamples",
    "PackedBatch",
    "PackedForward",
    "Recorder",
    "Report",
    "StoredTrajectories",
    "Trajectory",
    "TuneOptions",
    "autoregressive_loss",
    "collect_trajectories",
    "decode_recorded",
    "draw_progress",
    "draw_trajectories",
    "evaluate",
    "fingerprint",
    "global_consistency_loss",
    "load_for_training",
    "local_consistency_loss",
    "pack",
    "packed_losses",
    "perplexity",
    "read_prompts",
    "train_round",
    "tune",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    missing = [package for package in _EXTRA if not _is_installed(package)]
    if missing and (home not in _NEED_TORCH_ALONE or "torch" in missing):
        raise ImportError(
            f"training needs {', '.join(missing)}: pip install 'langchain-parallel-decoding[training]'"
        )
    return getattr(import_module(f"{__name__}.{home}"), name)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # blocked in sys.modules
        return False


def __dir__() -> list[str]:
    return sorted(__all__)
