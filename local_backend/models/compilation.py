"""The blocks between attentions through ``torch.compile``, which makes one kernel of several.

Attention stays as it is: it reads a cache of ours whose length changes with every token. What stands between
is the same program for every layer, so it is compiled once, for any number of rows and any width. On a GPU,
the mode ``"reduce-overhead"`` replays each block as a CUDA graph; the engine pads forwards to few widths, so
that there are few graphs.

Knows ``transformers``' decoder layers. Does not know forwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from local_backend.models.prepacking import unpack

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_blocks(model: PreTrainedModel, mode: str | None = None) -> None:
    """Compile, in place, what is no attention in a model's layers; ``model.generate`` then uses it, too.

    The first forward takes seconds longer. Compiled before, a block is left alone.

    Args:
        model: With decoder layers, of which the attentions know their ``layer_idx``.
        mode: One of ``torch.compile``'s, e.g. ``"reduce-overhead"`` or ``"max-autotune"``.

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
    unpack(model)  # the compiler has products of its own
    for block in blocks:
        if not is_compiled(block):
            block.compile(dynamic=True, mode=mode)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether any part of a module runs compiled."""
    return any(getattr(part, "_compiled_call_impl", None) is not None for part in module.modules())


__all__ = ["compile_blocks", "is_compiled"]
