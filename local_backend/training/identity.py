"""Telling models apart: a short digest of weights and vocabulary.

A trajectory is worth something to the model that wrote it and to no other.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SAMPLED_VALUES = 4096  # of each tensor; any training step changes nearly all of them


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of names, shapes and evenly spaced values of the model's weights, and of the vocabulary.

    The same whatever type the same values are loaded in, and on whatever device.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().reshape(-1)
        step = max(1, len(values) // _SAMPLED_VALUES)
        sampled = values[::step].to("cpu", torch.float32).contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sampled.numpy().tobytes())
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{number}\0{token}\0".encode())
    return digest.hexdigest()[:16]
