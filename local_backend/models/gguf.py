"""Recognises and reads GGUF files, the model format of llama.cpp, Ollama and LM Studio.

``transformers`` does the reading; the weights are dequantized. Knows files. Does not know the engine.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_MAGIC = b"GGUF"


def is_gguf(path: str | Path) -> bool:
    """Whether ``path`` is a GGUF file; by its first bytes, since Ollama's files have no suffix."""
    path = Path(path)
    if not path.is_file():
        if path.suffix == ".gguf":
            raise FileNotFoundError(f"{path} does not exist: give the path of a GGUF file")
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def load_gguf(path: Path, options: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a model and its tokenizer.

    Args:
        path: The file.
        options: Arguments of ``AutoModelForCausalLM.from_pretrained``, including ``dtype``.

    Raises:
        ValueError: ``transformers`` cannot read the file.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Dequantize: otherwise every forward would unpack the weights, and drafts need wide forwards.
    options = {"quantization_config": GgufConfig(dequantize=True), **options}
    logging.getLogger(__name__).info("reading %s: the weights are dequantized to %s", path, options["dtype"])
    with _with_gguf_suffix(path) as (folder, name):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
            model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, **options)
        except Exception as error:  # e.g. struct.error in a truncated file
            raise _unreadable(path, error) from error
    # The weights are plain tensors by now; with this entry the model could not be saved.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # The file's own name for the model is e.g. "Smollm2 135M 8k Lc100K Mix1 Ep2": cache keys need the path.
    model.config._name_or_path = model.name_or_path = str(path)
    return model, tokenizer


def gguf_parts(
    path: Path, described_by: Path | None = None
) -> tuple[PretrainedConfig, GenerationConfig, PreTrainedTokenizerBase]:
    """Read all but the weights: configuration, generation config and tokenizer.

    Args:
        path: The file.
        described_by: A folder with the same, which is faster to read.

    Raises:
        ValueError: ``transformers`` cannot read the file.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    if described_by is not None:
        config = AutoConfig.from_pretrained(described_by)
        generation_config = GenerationConfig.from_pretrained(described_by)
        return config, generation_config, AutoTokenizer.from_pretrained(described_by)
    with _with_gguf_suffix(path) as (folder, name):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
            config = AutoConfig.from_pretrained(folder, gguf_file=name)
        except Exception as error:  # e.g. struct.error in a truncated file
            raise _unreadable(path, error) from error
    return config, GenerationConfig.from_model_config(config), tokenizer


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"transformers cannot read {path}: {type(error).__name__}: {error}. If the file is whole, "
        "its architecture is not supported: give one that is (e.g. llama, qwen2, qwen3, gemma3, "
        "phi3), or the model's folder in its own format"
    )


@contextmanager
def _with_gguf_suffix(path: Path) -> Iterator[tuple[Path, str]]:
    """The folder and name of a GGUF file; ``transformers`` needs the suffix, which Ollama's files lack."""
    path = path.resolve()
    if path.suffix == ".gguf":
        yield path.parent, path.name
        return
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "model.gguf"
        link.symlink_to(path)
        yield link.parent, link.name
