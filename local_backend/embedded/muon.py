"""Muon: an optimizer whose every update of a weight matrix is orthogonal.

After K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks" (2024): momentum, then
a Newton-Schulz iteration that sends all singular values near 1. ``torch.optim.Muon`` is the same in bfloat16,
one matrix at a time; without bfloat16 units in the processor that takes several times as long as the
training step itself, hence this one: in float32, matrices of one shape stacked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic, from the source
_NUM_ITERATIONS = 5


class Muon:
    """Updates matrices in place from their gradients.

    Args:
        matrices: Two-dimensional parameters.
        learning_rate: Scaled so that an update has the mean square AdamW's would have.
        weight_decay: Share of the learning rate by which weights shrink.
        momentum: Of the running mean of gradients (Nesterov's).
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        learning_rate: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        self.learning_rate, self.weight_decay, self.momentum = learning_rate, weight_decay, momentum
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            if matrix.dim() != 2:
                raise ValueError(f"Muon updates matrices; given a parameter of shape {tuple(matrix.shape)}")
            by_shape[matrix.shape].append(matrix)
        self._groups = list(by_shape.values())
        self._means = [torch.zeros_like(torch.stack(group)) for group in self._groups]

    @torch.no_grad()
    def step(self) -> None:
        """Update every matrix; gradients stay as they are until :meth:`zero_grad`."""
        for group, mean in zip(self._groups, self._means, strict=True):
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            mean.lerp_(gradients, 1 - self.momentum)
            update = orthogonalize(gradients.lerp_(mean, self.momentum))
            rate = 0.2 * max(update.shape[-2:]) ** 0.5 * self.learning_rate
            for matrix, change in zip(group, update, strict=True):
                matrix.mul_(1 - self.learning_rate * self.weight_decay)
                matrix.add_(change, alpha=-rate)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for group in self._groups:
            for matrix in group:
                matrix.grad = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"means": self._means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's."""
        for mean, kept in zip(self._means, state["means"], strict=True):
            mean.copy_(kept)


def orthogonalize(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly: singular values between 0.7 and 1.2.

    Args:
        matrices: ``[count, rows, columns]``, float32.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    nearer = matrices.mT if is_tall else matrices
    nearer = nearer / nearer.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    first, third, fifth = _COEFFICIENTS
    for _ in range(_NUM_ITERATIONS):
        gram = nearer @ nearer.mT
        nearer = torch.baddbmm(
            nearer, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), nearer, beta=first
        )
    return nearer.mT if is_tall else nearer


__all__ = ["Muon", "orthogonalize"]
