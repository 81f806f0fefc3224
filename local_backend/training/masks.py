"""A packed batch in the form a model takes it: the mask of each kind of its layers.

Knows how ``transformers`` models want to be called. Does not know examples or losses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from local_backend.architecture import Architecture
from local_backend.row_maker import vocabulary_size
from local_backend.training.packing import PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedForward:
    """Runs a model on packed batches.

    Args:
        model: Without adapters around it, see :class:`~local_backend.architecture.Architecture`.

    Raises:
        ValueError: The model cannot be given masks and positions; says why.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        architecture = Architecture.of(model)
        self.max_positions = architecture.max_positions
        self.vocabulary_size = vocabulary_size(model)
        self._windows = architecture.windows
        self._is_additive = getattr(model.config, "_attn_implementation", None) == "eager"
        self._dtype = architecture.mask_dtype if architecture.mask_dtype != torch.bool else model.dtype

    def __call__(self, model: Any, batch: PackedBatch) -> Tensor:
        """Logits of every column.

        Args:
            model: The model this was made for, or what stands around it (an adapter, accelerate's wrapper).
            batch: On the model's device.

        Returns:
            ``[rows, width, vocabulary]``.
        """
        logits: Tensor = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=self.masks(batch),
            use_cache=False,
        ).logits
        return logits

    def masks(self, batch: PackedBatch) -> Tensor | dict[str, Tensor]:
        """Masks ``[rows, 1, width, width]``; a dict where kinds of layers differ."""
        distance = batch.position_ids[:, :, None] - batch.position_ids[:, None, :]
        masks = {}
        for kind, window in self._windows.items():
            seen = batch.sees if window is None else batch.sees & (distance < window)
            masks[kind] = self._in_dtype(seen)[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _in_dtype(self, seen: Tensor) -> Tensor:
        if not self._is_additive:
            return seen  # also right where autocast computes in another type than the weights have
        lowest = torch.finfo(self._dtype).min
        return torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, lowest)


def use_fast_attention(model: PreTrainedModel) -> None:
    """On a CPU let the model attend by plain matrix products.

    Their backward pass takes half the time of the fused one's there, for rows of a few hundred tokens.
    """
    if model.device.type == "cpu":
        model.set_attn_implementation("eager")
