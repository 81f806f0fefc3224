"""Telling models, prompts and trajectories apart, by short digests.

A trajectory is worth something to the model that wrote it and to no other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from local_backend.training.examples import Trajectory, lengths_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SAMPLED_VALUES = 4096  # of each tensor; any training step changes nearly all of them
_NUM_DIGESTED = 256  # trajectories, beside the lengths of all


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


def digest_of_prompts(prompts: Sequence[Sequence[int]]) -> str:
    """Tells prompts from others."""
    token_ids = json.dumps([list(map(int, prompt)) for prompt in prompts])
    return hashlib.sha256(token_ids.encode()).hexdigest()[:16]


def digest_of(trajectories: Sequence[Trajectory]) -> str:
    """Tells trajectories from others: the lengths of all, the tokens of some, evenly spaced."""
    digest = hashlib.sha256(json.dumps(lengths_of(trajectories)).encode())
    for place in range(0, len(trajectories), max(1, len(trajectories) // _NUM_DIGESTED)):
        one = trajectories[place]
        digest.update(repr((one.prompt_ids, one.answer_ids, one.starts, one.iterates)).encode())
    return digest.hexdigest()[:16]
