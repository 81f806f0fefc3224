"""Adapters that are active at guessed positions alone: clean text is read by the plain model, which verifies.

Knows packed batches. Does not know uses or how adapters are trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from local_backend.training.packing import Batch, PackedForward


class GuessAdapter(torch.nn.Module):
    """A linear layer with an adapter that is active where ``gate`` is 1; elsewhere it is the layer itself.

    ``gate`` is shared by all adapters of a model and set before each forward: ``[rows, width, 1]``.
    """

    def __init__(self, layer: torch.nn.Linear, rank: int, gate: list[Tensor]) -> None:
        super().__init__()
        self.layer, self._gate = layer, gate
        options: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.down = torch.nn.Linear(layer.in_features, rank, bias=False, **options)
        self.up = torch.nn.Linear(rank, layer.out_features, bias=False, **options)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output, and the adapter's at guessed positions."""
        output: Tensor = self.layer(hidden)
        changed: Tensor = output + self._gate[0].to(output.dtype) * self.up(self.down(hidden))
        return changed


class GatedForward(PackedForward):
    """Activates the adapters at the guesses of a packed batch."""

    def __init__(self, model: Any, gate: list[Tensor]) -> None:
        super().__init__(model)
        self._gate = gate

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states; those of clean text are the plain model's."""
        self._gate[0] = batch.is_guess[..., None]
        return super().hidden(batch)


def add_adapters(model: Any, rank: int) -> list[Tensor]:
    """Put adapters around the linear layers of all blocks, which alone have gradients; their gate."""
    gate = [torch.zeros(1, 1, 1, device=model.device)]
    torch.manual_seed(0)
    model.requires_grad_(False)
    for module in list(model.base_model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, torch.nn.Linear):
                setattr(module, name, GuessAdapter(layer, rank, gate))
    return gate
