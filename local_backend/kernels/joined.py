"""Weights of linear layers that read the same inputs, joined in one matrix without a copy for each.

Knows linear layers. Does not know what they compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class JoinedWeights:
    """The weights of linear layers that read the same inputs in one matrix; the layers have views of it."""

    weight: Tensor  # [out of all layers, in]
    bias: Tensor | None  # [out of all layers]
    _views: list[tuple[dict[str, Any], str, int]]  # parameters of a layer, name and address

    @classmethod
    def of(cls, modules: Sequence[torch.nn.Linear]) -> JoinedWeights:
        """Join the weights, unless they are already; the layers compute as before, and can be trained."""
        joined: dict[str, Tensor | None] = {}
        views = []
        for name in ("weight", "bias"):
            parts = [getattr(module, name) for module in modules]
            whole = None if parts[0] is None else _whole(parts)
            joined[name] = whole
            if whole is None:
                continue
            for module, part, view in zip(modules, parts, whole.split([*map(len, parts)]), strict=True):
                part.data = view
                views.append((module._parameters, name, view.data_ptr()))
        assert joined["weight"] is not None
        return cls(joined["weight"], joined["bias"], views)

    def is_intact(self) -> bool:
        """Whether the layers' tensors are still the views."""
        return all(parameters[name].data_ptr() == address for parameters, name, address in self._views)


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one after another in one tensor: that of which they already are all rows, or a new one."""
    base = parts[0].untyped_storage().data_ptr()
    if all(
        one.untyped_storage().data_ptr() == base and one.data_ptr() == before.data_ptr() + before.nbytes
        for before, one in itertools.pairwise(parts)
    ):
        first = parts[0].detach()
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    return torch.cat([one.detach() for one in parts])
