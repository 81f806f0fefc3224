"""Consistency training: a model learns to emit many tokens per forward under Jacobi decoding.

It learns to predict from its own guesses what the plain model predicts from the right text (after arXiv
2403.00835), and what the plain model predicts there. ``python -m local_backend.training tune`` and
:func:`tune` go from prompts to a tuned model, with speed and quality measured before and after.

Needs the ``training`` extra. No other part of the package imports this one.
"""

from importlib.util import find_spec

if missing := [name for name in ("torch", "accelerate", "datasets", "peft") if find_spec(name) is None]:
    raise ImportError(f"training needs {', '.join(missing)}: pip install '.[training]' in a checkout")

from local_backend.offline.prompt_file import read_prompts
from local_backend.training.answers import CollectOptions, StoredAnswer, collect_answers, stored_answers
from local_backend.training.checkpoints import fingerprint
from local_backend.training.evaluation import evaluate, perplexity
from local_backend.training.options import TuneOptions, load_for_training
from local_backend.training.streams import NoiseOptions
from local_backend.training.trainer import Training
from local_backend.training.tuning import Report, prepare, tune

__all__ = ["CollectOptions", "NoiseOptions", "Report", "StoredAnswer", "Training", "TuneOptions"]
__all__ += ["collect_answers", "evaluate", "fingerprint", "load_for_training", "perplexity", "prepare"]
__all__ += ["read_prompts", "stored_answers", "tune"]
