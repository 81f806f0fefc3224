"""Makes the encoder's weights: ``python -m benchmarks.router_training.quantise FOLDER-OF-ALL-MINILM-L6-V2``.

Keeps the layers and positions the encoder uses and rounds matrices to eight bits with one scale a row.
Changes nothing else, so nothing is trained here.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sot_chains.router.encoder import MAX_TOKENS, WEIGHTS

_NUM_LAYERS = 5
_MATRICES = {"merge": "attention.output.dense", "widen": "intermediate.dense", "narrow": "output.dense"}
_NORMS = {"attention_norm": "attention.output.LayerNorm", "output_norm": "output.LayerNorm"}
_LARGEST = 127


def quantise(tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The encoder's tensors, from those of a BERT model under their names in ``transformers``."""
    made: dict[str, NDArray[Any]] = {}

    def matrix(name: str, values: NDArray[Any]) -> None:
        scale = np.maximum(np.abs(values).max(axis=1), np.finfo(np.float32).tiny) / _LARGEST  # [rows]
        made[f"{name}.int8"] = np.round(values / scale[:, None]).astype(np.int8)
        made[f"{name}.scale"] = scale.astype(np.float32)

    matrix("words", tensors["embeddings.word_embeddings.weight"])
    made["positions"] = (
        tensors["embeddings.position_embeddings.weight"][:MAX_TOKENS]
        + tensors["embeddings.token_type_embeddings.weight"][0]
    )
    for part in ("weight", "bias"):
        made[f"norm.{part}"] = tensors[f"embeddings.LayerNorm.{part}"]
    for number in range(_NUM_LAYERS):
        source, target = f"encoder.layer.{number}", f"layer.{number}"
        three = [f"{source}.attention.self.{name}" for name in ("query", "key", "value")]
        matrix(f"{target}.attend", np.concatenate([tensors[f"{name}.weight"] for name in three]))
        made[f"{target}.attend.bias"] = np.concatenate([tensors[f"{name}.bias"] for name in three])
        for ours, theirs in _MATRICES.items():
            matrix(f"{target}.{ours}", tensors[f"{source}.{theirs}.weight"])
            made[f"{target}.{ours}.bias"] = tensors[f"{source}.{theirs}.bias"]
        for ours, theirs in _NORMS.items():
            for part in ("weight", "bias"):
                made[f"{target}.{ours}.{part}"] = tensors[f"{source}.{theirs}.{part}"]
    return {name: np.ascontiguousarray(values) for name, values in made.items()}


def main() -> None:
    """Reads the folder named on the command line and writes into ``weights/``."""
    from safetensors.numpy import load_file, save_file

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router_training.quantise", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="holds all-MiniLM-L6-v2: model.safetensors, tokenizer.json")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(quantise(load_file(options.folder / "model.safetensors")), options.out / "encoder.safetensors")
    shutil.copy(options.folder / "tokenizer.json", options.out / "tokenizer.json")


if __name__ == "__main__":
    main()
