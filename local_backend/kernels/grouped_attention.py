"""Grouped-query attention that reads keys and values in place.

With a mask and more than one new token ``transformers`` first copies the keys and values of each group of
heads, once for every head in it. Torch does not need copies: its CPU kernel reads a group's keys and values
in place. For the few new tokens of a draft it is even faster to fold the heads of a group into further new
tokens of one head: the keys and values are then read once for all heads, which on two cores with bfloat16
units takes half the time for 4 or 8 tokens after 1,200. On CUDA a mask would send grouped heads to a slow
kernel, so nothing changes there.

Knows attention functions. Does not know rows, drafts or the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from local_backend.kernels.block_attention import block_attention, is_faster_in_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "sdpa_in_place"
"""Name of the attention implementation in ``transformers``."""

MOST_FOLDED_TOKENS = 16  # new ones; with more, one head alone is enough work for the kernel

# Further arguments of ``sdpa_attention_forward`` that change what is computed.
_OTHER_COMPUTATION = ("softcap", "position_bias", "cache", "s_aux")


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention; falls back to ``sdpa_attention_forward`` where needed.

    Args:
        module: The attention layer.
        query: ``[rows, heads, new, head size]``.
        key: ``[rows, groups, columns, head size]``.
        value: As ``key``.
        attention_mask: ``[rows, 1, new, columns]``.
        dropout: As in ``transformers``.
        scaling: As in ``transformers``.
        is_causal: As in ``transformers``.
        **others: As in ``transformers``.

    Returns:
        ``[rows, new, heads, head size]``, and no weights.
    """
    if (
        attention_mask is None
        or query.shape[1] == key.shape[1]
        or query.shape[2] == 1
        or query.device.type != "cpu"
        or any(others.get(name) is not None for name in _OTHER_COMPUTATION)
    ):
        usual: tuple[Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **others,
        )
        return usual
    num_rows, num_heads, num_new, head_size = query.shape
    if attention_mask.shape[1] == 1 and not dropout and is_faster_in_blocks(query):
        attended = block_attention(query, key, value, attention_mask, scale=scaling)
        return attended.transpose(1, 2).contiguous(), None
    is_folded = num_new <= MOST_FOLDED_TOKENS and attention_mask.shape[1] == 1
    if is_folded:
        num_groups = key.shape[1]
        attention_mask = attention_mask.repeat(1, 1, num_heads // num_groups, 1)
        query = query.reshape(num_rows, num_groups, -1, head_size)
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=not is_folded,
    ).reshape(num_rows, num_heads, num_new, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def read_in_place(model: PreTrainedModel) -> None:
    """Use this attention in ``model`` if it has grouped heads, uses ``sdpa`` and runs on a CPU.

    ``model.generate`` then uses it, too.
    """
    config = model.config.get_text_config(decoder=True)
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if (
        getattr(config, "_attn_implementation", None) == "sdpa"
        and groups < config.num_attention_heads
        and model.device.type == "cpu"
    ):
        AttentionInterface.register(NAME, grouped_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
