"""Reads GGUF files, the model format of llama.cpp, Ollama and LM Studio, and keeps converted copies of them.

``transformers`` does the reading; the weights are dequantized. That takes up to minutes, so a copy that loads
fast is kept in the user's cache directory, as ``transformers`` saves it, for each content of a file and each
dtype in use. Knows files. Does not know the engine.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from tqdm.auto import tqdm

from local_backend.models.files import find_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

_HEAD_BYTES = 2**24  # names, vocabulary and template stand there
_SAMPLES, _SAMPLE_BYTES = 256, 2**14  # of the weights behind

_log = logging.getLogger(__name__)


def load_gguf(path: Path, options: dict[str, Any]) -> Loaded:
    """The model, with ``options`` of ``from_pretrained``, and its tokenizer; ``ValueError`` if unreadable."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    # A quantization config may ask for the file's own quantized weights, which a copy does not hold.
    model: PreTrainedModel
    found = None if "quantization_config" in options else converted(path, options["dtype"])
    if isinstance(found, Path):
        # AutoTokenizer would add what the architecture's class adds, e.g. Qwen's normalizer.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(found)
        model = AutoModelForCausalLM.from_pretrained(found, **options)
    elif found is None or len(options) > 1:
        model, tokenizer = _read(path, options)
    else:
        model, tokenizer = found
    # The file's own name for the model is e.g. "Smollm2 135M 8k Lc100K Mix1 Ep2": cache keys need the path.
    model.config._name_or_path = model.name_or_path = str(path)
    return model, tokenizer


def converted(path: Path, dtype: torch.dtype) -> Path | Loaded:
    """The folder of the copy, made at its first use; the model and its tokenizer if it cannot be saved."""
    from filelock import FileLock
    from platformdirs import user_cache_path

    name = f"{path.stem}-{str(dtype).removeprefix('torch.')}-{_digest(path)}"
    folder = user_cache_path("langchain-parallel-decoding") / "models" / name
    loaded = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # if several processes start at once, one converts
            with suppress(FileNotFoundError, ValueError):  # not there yet, or e.g. cut off by a loss of power
                return Path(find_model(folder))
            _log.warning("converting %s to %s, once, for faster loading; may take minutes", path, dtype)
            loaded = _read(path, {"dtype": dtype})
            _save(loaded, folder)
    except (OSError, SafetensorError) as error:  # e.g. a cache directory that cannot be written to
        _log.warning("cannot save the converted copy of %s in %s: %s", path, folder.parent, error)
        return loaded or _read(path, {"dtype": dtype})
    return folder


def _digest(path: Path) -> str:
    """Identifies the content in some 20 ms; path and time differ between installations of a package."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _save(loaded: Loaded, folder: Path) -> None:
    size = sum(weight.nbytes for weight in loaded[0].parameters())
    if shutil.disk_usage(folder.parent).free < 2 * size:
        raise OSError(f"it takes {size / 2**30:.1f} GiB, and less than twice as much is free")
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for rest in (unfinished, folder):  # of a conversion that was killed, or damaged
        shutil.rmtree(rest, ignore_errors=True)
    try:
        for part in loaded:
            part.save_pretrained(unfinished)
        unfinished.rename(folder)  # only when it is complete
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _log.warning("the copy is %s (%.1f GiB); it can be deleted at any time", folder, size / 2**30)


def _read(path: Path, options: dict[str, Any]) -> Loaded:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Dequantize: otherwise every forward would unpack the weights, and drafts need wide forwards.
    options = {"quantization_config": GgufConfig(dequantize=True), **options}
    with tempfile.TemporaryDirectory() as folder:
        # transformers needs the suffix, which Ollama's files lack.
        file = Path(folder, "model.gguf")
        file.symlink_to(path.resolve())
        try:
            # Beside transformers' own bar of the weights: the vocabulary takes as long.
            with tqdm(total=2, desc=f"reading {path.name}", unit="part", disable=None) as bar:
                tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
                bar.update()
                model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, **options)
                bar.update()
        except Exception as error:  # e.g. struct.error in a truncated file
            raise ValueError(
                f"transformers cannot read {path}: {type(error).__name__}: {error}. If the file is whole, "
                "its architecture is not supported: give one that is (e.g. llama, qwen2, qwen3, gemma3, "
                "phi3), or the model's folder in its own format"
            ) from error
    # The weights are plain tensors by now; with this entry the model could not be saved.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer
