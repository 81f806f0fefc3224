"""Reads GGUF files, the model format of llama.cpp, Ollama and LM Studio.

``transformers`` does the reading; the weights are dequantized. Knows files. Does not know the engine.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    with tempfile.TemporaryDirectory() as folder:
        # transformers needs the suffix, which Ollama's files lack.
        file = Path(folder, "model.gguf")
        file.symlink_to(path.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, **options)
        except Exception as error:  # e.g. struct.error in a truncated file
            raise ValueError(
                f"transformers cannot read {path}: {type(error).__name__}: {error}. If the file is whole, "
                "its architecture is not supported: give one that is (e.g. llama, qwen2, qwen3, gemma3, "
                "phi3), or the model's folder in its own format"
            ) from error
    # The weights are plain tensors by now; with this entry the model could not be saved.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # The file's own name for the model is e.g. "Smollm2 135M 8k Lc100K Mix1 Ep2": cache keys need the path.
    model.config._name_or_path = model.name_or_path = str(path)
    return model, tokenizer
