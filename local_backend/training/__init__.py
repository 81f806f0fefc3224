"""Consistency training: a model learns to emit many tokens per forward under Jacobi decoding.

Trajectories of the model's own decoding (:class:`StoredTrajectories`), losses that pull its predictions on a
guess towards those on the fixed point, a trainer on top of ``transformers.Trainer``, and measures of speed
and quality before and after. ``python -m local_backend.training tune`` and :func:`tune` do all of it. Where a
model is to stay as it is, :func:`fit_to_answers` fits the drafter that copies to its answers instead.

Needs the ``training`` extra (datasets, peft, matplotlib). No other part of the package imports this one, and
the names below are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from local_backend.drafting.copy_tree import CopyWeights
    from local_backend.offline.prompt_file import read_prompts
    from local_backend.plots import draw_progress, draw_trajectories
    from local_backend.sequences.outputs import Trajectory
    from local_backend.training.copying import CopyFit, KnownAnswer, fit_copy_weights, fit_to_answers
    from local_backend.training.evaluation import Evaluation, Likeness, evaluate, perplexity
    from local_backend.training.examples import NoiseOptions, NoisyExamples
    from local_backend.training.losses import (
        autoregressive_loss,
        global_consistency_loss,
        local_consistency_loss,
    )
    from local_backend.training.packing import Copy, Example, PackedBatch, PackedForward, pack
    from local_backend.training.rounds import TuneOptions, load_for_training, train_round
    from local_backend.training.trainer import ConsistencyTrainer, LossOptions, packed_losses
    from local_backend.training.trajectories import (
        CollectOptions,
        Recorder,
        collect_trajectories,
        decode_recorded,
    )
    from local_backend.training.trajectory_store import StoredTrajectories, fingerprint
    from local_backend.training.tuning import Report, tune

_HOMES = {
    "CollectOptions": "training.trajectories",
    "ConsistencyTrainer": "training.trainer",
    "Copy": "training.packing",
    "CopyFit": "training.copying",
    "CopyWeights": "drafting.copy_tree",
    "Evaluation": "training.evaluation",
    "Example": "training.packing",
    "KnownAnswer": "training.copying",
    "Likeness": "training.evaluation",
    "LossOptions": "training.trainer",
    "NoiseOptions": "training.examples",
    "NoisyExamples": "training.examples",
    "PackedBatch": "training.packing",
    "PackedForward": "training.packing",
    "Recorder": "training.trajectories",
    "Report": "training.tuning",
    "StoredTrajectories": "training.trajectory_store",
    "Trajectory": "sequences.outputs",
    "TuneOptions": "training.rounds",
    "autoregressive_loss": "training.losses",
    "collect_trajectories": "training.trajectories",
    "decode_recorded": "training.trajectories",
    "draw_progress": "plots",
    "draw_trajectories": "plots",
    "evaluate": "training.evaluation",
    "fingerprint": "training.trajectory_store",
    "fit_copy_weights": "training.copying",
    "fit_to_answers": "training.copying",
    "global_consistency_loss": "training.losses",
    "load_for_training": "training.rounds",
    "local_consistency_loss": "training.losses",
    "pack": "training.packing",
    "packed_losses": "training.trainer",
    "perplexity": "training.evaluation",
    "read_prompts": "offline.prompt_file",
    "train_round": "training.rounds",
    "tune": "training.tuning",
}
# Packages of the `training` extra, which includes `local`.
_EXTRA = ("torch", "accelerate", "datasets", "peft", "matplotlib")
_NEED_TORCH_ALONE = {
    "drafting.copy_tree",
    "sequences.outputs",
    "training.examples",
    "training.losses",
    "training.packing",
}

__all__ = [
    "CollectOptions",
    "ConsistencyTrainer",
    "Copy",
    "CopyFit",
    "CopyWeights",
    "Evaluation",
    "Example",
    "KnownAnswer",
    "Likeness",
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
    "fit_copy_weights",
    "fit_to_answers",
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
        raise ImportError(f"training needs {', '.join(missing)}: pip install '.[training]' in a checkout")
    return getattr(import_module(f"local_backend.{home}"), name)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # blocked in sys.modules
        return False


def __dir__() -> list[str]:
    return sorted(__all__)
