"""Consistency training: a model learns to emit many tokens per forward under Jacobi decoding.

Trajectories of the model's own decoding (:class:`StoredTrajectories`), losses that pull its predictions on a
guess towards those on the fixed point (arXiv 2403.00835), a trainer on top of ``transformers.Trainer``, and
measures of speed and quality before and after. ``python -m local_backend.training tune`` and :func:`tune` do
all of it.

Needs the ``training`` extra. No other part of the package imports this one.
"""

from importlib.util import find_spec

if missing := [name for name in ("torch", "accelerate", "datasets", "peft") if find_spec(name) is None]:
    raise ImportError(f"training needs {', '.join(missing)}: pip install '.[training]' in a checkout")

from local_backend.offline.prompt_file import read_prompts
from local_backend.sequences.outputs import Trajectory
from local_backend.training.checkpoints import fingerprint
from local_backend.training.evaluation import evaluate, perplexity
from local_backend.training.examples import NoiseOptions
from local_backend.training.rounds import TuneOptions, load_for_training, train_round
from local_backend.training.trainer import LossOptions
from local_backend.training.trajectories import (
    CollectOptions,
    Recorder,
    collect_trajectories,
    decode_recorded,
)
from local_backend.training.trajectory_store import StoredTrajectories
from local_backend.training.tuning import Report, tune

__all__ = [
    "CollectOptions",
    "LossOptions",
    "NoiseOptions",
    "Recorder",
    "Report",
    "StoredTrajectories",
    "Trajectory",
    "TuneOptions",
    "collect_trajectories",
    "decode_recorded",
    "evaluate",
    "fingerprint",
    "load_for_training",
    "perplexity",
    "read_prompts",
    "train_round",
    "tune",
]
