"""Checks that a model computes the same logits in the engine as when it is called alone.

Runs a few tokens in two rows of different lengths, a draft tree and a rollback. Faults that a configuration
does not reveal (an ignored mask, positions counted by the model, state besides keys and values) show here,
once, when an engine is created, and not in the generated text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.drafting.draft import EMPTY_DRAFT, Draft
from local_backend.kernels.graphs import Execution
from local_backend.models.architecture import Architecture
from local_backend.models.runner import ModelRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUM_TOKENS = 12
_LENGTHS = (7, 4)  # of the two rows before the draft
# After the row's last token: a wrong one with a wrong child, the right one, its right child, a wrong child.
_PARENTS = (-1, 0, -1, 2, 2)
_RIGHT_NODES = (2, 3)


def verify_compatibility(model: PreTrainedModel, architecture: Architecture, execution: Execution) -> None:
    """Compare the engine's logits with those of the model, which is in evaluation mode.

    Raises:
        ValueError: The logits differ, or the model cannot be called that way.
    """
    if architecture.max_positions < _NUM_TOKENS:
        return
    name = type(model).__name__
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    text = [(7 * number + 3) % vocabulary for number in range(_NUM_TOKENS)]
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([text], device=architecture.device), use_cache=False).logits[0]
    try:
        difference = _difference(model, architecture, execution, text, own)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be called as the engine calls it (rows of different lengths, positions and masks "
            f"given): {type(error).__name__}: {error}. Use model.generate for it"
        ) from error
    # Rounding differs with the batch shape; errors of masks or positions are far larger.
    tolerance = max(1e-3, 30 * torch.finfo(model.dtype).eps)
    if not difference <= tolerance:
        raise ValueError(
            f"{name} computes other logits in a batch with drafts than alone (they differ by "
            f"{difference:.2g} of their spread, rounding would be below {tolerance:.2g}): it ignores the "
            "mask or the positions it is given, keeps state besides keys and values, or quantises "
            "activations depending on the rest of the batch. Use model.generate for it, or a model with "
            "plain full or sliding-window attention and weight-only quantisation"
        )


@torch.inference_mode()
def _difference(
    model: PreTrainedModel, architecture: Architecture, execution: Execution, text: Sequence[int], own: Tensor
) -> float:
    """Largest mean difference of logits at one position, in units of their standard deviation.

    ``own`` are the model's own logits after each token of ``text``, ``[tokens, vocabulary]``.
    """
    wrong = [(token + 1) % own.shape[-1] for token in text]
    cache = RaggedKVCache(architecture.num_layers, max_rows=len(_LENGTHS))
    forward = ModelRunner(model, cache, architecture, execution._replace(with_graphs=False))
    rows = [cache.add_row() for _ in _LENGTHS]
    forward(0, [text[:length] for length in _LENGTHS], [EMPTY_DRAFT] * len(rows), with_logits=False)
    for row, length in zip(rows, _LENGTHS, strict=True):
        cache.commit(row, range(length))
    trees = [
        Draft((wrong[n + 1], wrong[n + 2], text[n + 1], text[n + 2], wrong[n + 2]), _PARENTS)
        for n in _LENGTHS
    ]
    drafted = forward(0, [[text[length]] for length in _LENGTHS], trees)
    kept = [0, *(node + 1 for node in _RIGHT_NODES)]
    for row in rows:
        cache.commit(row, kept)
    after = forward(0, [[text[length + len(kept)]] for length in _LENGTHS], [EMPTY_DRAFT] * len(rows))
    assert drafted is not None
    assert after is not None
    differences: list[Tensor] = []
    for row, length in zip(rows, _LENGTHS, strict=True):
        for offset, logits in enumerate([*drafted[row, kept], after[row, 0]]):
            plain = own[length + offset].to(logits.device)
            possible = plain.isfinite()  # some models give -inf to tokens that must never be emitted
            ours, theirs = logits[possible].float(), plain[possible].float()
            differences.append((ours - theirs).abs().mean() / theirs.std().clamp_min(1e-6))
    return torch.stack(differences).max().item()  # NaN if any is
