"""Attention of the build: plain matrix products, of what is seen alone.

Where every column sees hardly more than what stands before it, half of a square of scores is nothing. Here
they are computed part by part of the columns, each with what one of them sees, and no more. For the rows of
the build, a few hundred tokens, that takes little more than half the time of
:func:`~local_backend.training.masks.use_fast_attention`, which itself takes half of the fused one's.

Knows the shapes of masks. Does not know what they are for.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PARTWISE = "local_backend_partwise"  # the name by which models are given it
_NUM_PARTS = 4


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float, **_: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of all columns, ``[rows, heads, columns, head size]``, in which some may hang from others.

    Args:
        module: Of the layer; whoever hooks into it gets the weights, for which all scores are computed.
        query: ``[rows, heads, columns, head size]``.
        key: Of the same shape.
        value: Of the same shape.
        mask: Additive, ``[rows, 1, columns, width]``; columns behind the first ``width`` are seen by
            themselves alone. ``None``: each column sees those before it, and itself.
        scaling: Of the scores.

    Returns:
        The output, ``[rows, columns, heads, head size]``, and the weights or ``None``.
    """
    num_columns = query.shape[2]
    width = num_columns if mask is None else mask.shape[-1]
    query = query * scaling
    if mask is None:
        mask = torch.full((num_columns, num_columns), torch.finfo(torch.float32).min).triu(1)[None, None]
    if module._forward_hooks and width == num_columns:
        weights = torch.softmax(query @ key.transpose(2, 3) + mask, -1)
        return (weights @ value).transpose(1, 2).contiguous(), weights
    outputs = []
    for first, end in pairwise([*_parts(0, width), *_parts(width, num_columns), num_columns]):
        columns = slice(first, end)
        seen = int((mask[:, 0, columns] == 0).any(0).any(0).nonzero()[-1]) + 1
        scores = query[:, :, columns] @ key[:, :, :seen].transpose(2, 3) + mask[:, :, columns, :seen]
        if first >= width:
            own = (query[:, :, columns] * key[:, :, columns]).sum(-1, keepdim=True)
            scores = torch.cat([scores, own], -1)
        weights = torch.softmax(scores, -1)
        output = weights[..., :seen] @ value[:, :, :seen]
        outputs.append(output if first < width else output + weights[..., seen:] * value[:, :, columns])
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _parts(first: int, end: int) -> list[int]:
    """Where the parts of these columns begin."""
    num_parts = min(_NUM_PARTS, end - first)
    return [first + (end - first) * part // num_parts for part in range(num_parts)]


ALL_ATTENTION_FUNCTIONS.register(PARTWISE, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(PARTWISE, lambda *_, **given: given.get("attention_mask"))

__all__ = ["PARTWISE", "attend"]
