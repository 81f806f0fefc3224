"""Attention of a long prompt in blocks of queries, for bfloat16 on a CPU.

Torch's kernel for a CPU is fast in bfloat16 where the processor has matrix units (AMX). With AVX-512 alone it
takes as long as in float32: on two cores of a Zen 5, 10 ms for 9 heads of 1,000 tokens, half of the time that
reading the prompt takes. Products of plain matrices, a block of queries after another with the columns that
it may attend to, take half. Scores are rounded to bfloat16, as in the eager attention of ``transformers``.

Knows queries, keys, values and masks. Does not know rows, drafts or the cache.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_BLOCK = 128  # queries
_MOST_DRAFTED = 64  # new tokens of a forward that may verify drafts: their kernel does not change here


def is_faster_in_blocks(query: Tensor) -> bool:
    """Whether :func:`block_attention` is the faster way for ``[rows, heads, new, head size]``."""
    return (
        query.shape[2] > _MOST_DRAFTED
        and query.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and _has_only_avx512_bf16()
    )


@cache
def _has_only_avx512_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported())


def block_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, scale: float | None = None
) -> Tensor:
    """Scaled dot-product attention.

    Args:
        query: ``[rows, heads, new, head size]``; the new tokens are the last columns.
        keys: ``[rows, groups, columns, head size]``.
        values: As ``keys``.
        mask: ``[rows, 1, new, columns]``, boolean or to be added, which masks at least what comes after a
            token; ``None`` masks just that.
        scale: Of the products; by default one by the square root of the head size.

    Returns:
        ``[rows, heads, new, head size]``.
    """
    num_rows, num_heads, num_new, size = query.shape
    num_groups, num_columns = keys.shape[1:3]
    share = num_heads // num_groups  # heads of a group
    scaled = query * (size**-0.5 if scale is None else scale)
    # The heads of a group are further queries, next to each other for each token: blocks are plain matrices.
    queries = (
        scaled.view(num_rows, num_groups, share, num_new, size).transpose(2, 3).flatten(0, 1).flatten(1, 2)
    )
    output = torch.empty_like(queries)  # [rows * groups, new * heads of a group, head size]
    columns, values = keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)
    later = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool).triu_(1).repeat_interleave(share, 0)
    for start in range(0, num_new, _BLOCK):
        end = min(start + _BLOCK, num_new)
        count, seen = end - start, num_columns - num_new + end
        block = slice(start * share, end * share)
        scores = queries.new_empty(len(queries), count * share, seen)
        for one, query_block, column in zip(scores, queries[:, block], columns[:, :, :seen], strict=True):
            torch.mm(query_block, column, out=one)
        if mask is None:
            scores[:, :, seen - count :].masked_fill_(later[: count * share, :count], float("-inf"))
        else:
            masks = mask[:, :, start:end, :seen].repeat_interleave(share, 2)
            by_row = scores.view(num_rows, num_groups, count * share, seen)
            if mask.dtype == torch.bool:
                by_row.masked_fill_(~masks, torch.finfo(scores.dtype).min)
            else:
                by_row += masks
        shares = scores.softmax(-1)
        for one, share_block, value in zip(output[:, block], shares, values[:, :seen], strict=True):
            torch.mm(share_block, value, out=one)
    by_group = output.view(num_rows, num_groups, num_new, share, size)
    return by_group.transpose(2, 3).reshape(num_rows, num_heads, num_new, size)
