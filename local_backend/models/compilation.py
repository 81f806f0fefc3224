"""Compiles the layers between attention with ``torch.compile``, which fuses several kernels into one.

Attention is not compiled: it reads the engine's KV cache, whose length changes with every token. The other
blocks are the same program in every layer, so they are compiled once, for any number of rows and any width.
On a GPU, the mode ``"reduce-overhead"`` replays each block as a CUDA graph; the engine pads forwards to a few
widths, so there are few graphs.

Knows ``transformers``' decoder layers. Does not know forwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from local_backend.models.prepacking import unpack

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_blocks(model: PreTrainedModel, mode: str | None = None) -> None:
    """Compile the non-attention blocks of a model's layers in place; ``model.generate`` then uses them, too.

    The first forward takes seconds longer. Blocks that are already compiled are skipped.

    Args:
        model: Has decoder layers whose attention modules have a ``layer_idx``.
        mode: A mode of ``torch.compile``, e.g. ``"reduce-overhead"`` or ``"max-autotune"``.

    Raises:
        ValueError: There is no such mode, or the model has no such layers.
    """
    from torch._inductor import list_mode_options  # a second to import, and only needed here

    if mode is not None and mode not in list_mode_options():
        raise ValueError(
            f"torch.compile has no mode {mode!r}; it has {', '.join(map(repr, list_mode_options()))}"
        )
    blocks = [
        block
        for layer in getattr(model.base_model, "layers", None) or ()
        for block in layer.children()
        if not hasattr(block, "layer_idx")
    ]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no decoder layers to compile: leave compiled=False")
    unpack(model)  # the compiler has its own matrix products
    for block in blocks:
        if not is_compiled(block):
            block.compile(dynamic=True, mode=mode)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether any part of a module runs compiled."""
    return any(getattr(part, "_compiled_call_impl", None) is not None for part in module.modules())
