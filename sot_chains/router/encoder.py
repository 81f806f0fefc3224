"""A sentence encoder in numpy: maps a question to a vector that represents the kind of request.

The first five layers of all-MiniLM-L6-v2 (sentence-transformers; Apache License 2.0, see ``weights/NOTICE``),
a BERT encoder (arXiv 1810.04805, 2002.10957), with int8 weights. Knows token ids and matrices.
Does not know what the vectors are used for.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WEIGHTS = Path(__file__).parent / "weights"

Floats = NDArray[np.float32]

_NUM_HEADS = 12
# The start and the end of a long question tell what it asks for; time grows with the number of tokens.
MAX_TOKENS, _LAST_TOKENS = 40, 13
_LAYER_NORM_EPSILON = np.float32(1e-12)
_GELU_SCALE, _GELU_CUBIC = np.float32(0.7978845608), np.float32(0.044715)
_one_at_a_time = threading.Lock()


class Encoder:
    """Encodes questions, one at a time.

    Args:
        folder: Holds ``encoder.safetensors`` (int8 matrices with one scale per row) and ``tokenizer.json``.
    """

    def __init__(self, folder: Path = WEIGHTS) -> None:
        # Imported late: a rules-only router needs neither.
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        tensors = load_file(folder / "encoder.safetensors")
        self._words = tensors["words.int8"]  # [vocab, width]
        self._word_scales = tensors["words.scale"]  # [vocab]
        self._positions = tensors["positions"]  # [max tokens, width], including the token type embedding
        self._first_norm = tensors["norm.weight"], tensors["norm.bias"]
        num_layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layer."))
        self._layers = [_Layer(tensors, number) for number in range(num_layers)]
        self.width = self._words.shape[1]

    def encode(self, question: str) -> Floats:
        """The unit vector of ``question``: the mean over its tokens after the last layer, normalised."""
        # Only the ends are kept, so the tokenizer need not process the whole text.
        ids = self._tokenizer.encode(_ends(question)).ids
        if len(ids) > MAX_TOKENS:
            ids = ids[: MAX_TOKENS - _LAST_TOKENS] + ids[-_LAST_TOKENS:]
        states = self._words[ids] * self._word_scales[ids, None] + self._positions[: len(ids)]
        states = _layer_norm(states.astype(np.float32), *self._first_norm)
        # BLAS's own threads spin longer than they work on matrices this small. Their limit is per process, so
        # questions are encoded one at a time, which is faster than side by side, too.
        with _one_at_a_time, _blas().limit(limits=1):
            for layer in self._layers:
                states = layer(states)
        mean: Floats = states.mean(axis=0)
        return mean / np.linalg.norm(mean)


class _Layer:
    """One transformer layer; input and output states are ``[tokens, width]``."""

    def __init__(self, tensors: dict[str, NDArray[Any]], number: int) -> None:
        def matrix(name: str) -> Floats:
            quantised = tensors[f"layer.{number}.{name}.int8"]  # [out, in]
            scale = tensors[f"layer.{number}.{name}.scale"]  # [out]
            return np.ascontiguousarray((quantised * scale[:, None]).astype(np.float32).T)

        def vector(name: str) -> Floats:
            return np.asarray(tensors[f"layer.{number}.{name}"], dtype=np.float32)

        # Query, key and value concatenated.
        self.attend, self.attend_bias = matrix("attend"), vector("attend.bias")
        self.merge, self.merge_bias = matrix("merge"), vector("merge.bias")
        self.widen, self.widen_bias = matrix("widen"), vector("widen.bias")
        self.narrow, self.narrow_bias = matrix("narrow"), vector("narrow.bias")
        self.attention_norm = vector("attention_norm.weight"), vector("attention_norm.bias")
        self.output_norm = vector("output_norm.weight"), vector("output_norm.bias")

    def __call__(self, states: Floats) -> Floats:
        num_tokens, width = states.shape
        heads = (states @ self.attend + self.attend_bias).reshape(num_tokens, 3, _NUM_HEADS, -1)
        query, key, value = heads.transpose(1, 2, 0, 3)  # each [heads, tokens, width / heads]
        scores = query @ key.transpose(0, 2, 1) * np.float32((width // _NUM_HEADS) ** -0.5)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = (weights @ value).transpose(1, 0, 2).reshape(num_tokens, width)
        states = _layer_norm(states + mixed @ self.merge + self.merge_bias, *self.attention_norm)
        wide = states @ self.widen + self.widen_bias
        wide = 0.5 * wide * (1 + np.tanh(_GELU_SCALE * (wide + _GELU_CUBIC * wide * wide * wide)))
        return _layer_norm(states + wide @ self.narrow + self.narrow_bias, *self.output_norm)


def _layer_norm(states: Floats, weight: Floats, bias: Floats) -> Floats:
    centred = states - states.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    normed: Floats = centred / np.sqrt(variance + _LAYER_NORM_EPSILON) * weight + bias
    return normed


def _ends(question: str, num_characters: int = 4000) -> str:
    if len(question) <= 2 * num_characters:
        return question
    return question[:num_characters] + " " + question[-num_characters:]


@cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # it has none

    return ThreadpoolController().select(user_api="blas")
