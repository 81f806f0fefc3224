"""Attention on a CPU: keys and values are read in place, and long prompts attend in blocks of queries.

Torch's CPU kernel needs no copy of a group's keys and values for each of its heads. For the few new tokens of
a draft the heads of a group are folded into further new tokens of one head: keys and values are then read
once, in half the time for 4 or 8 tokens after 1,200. For many new tokens that kernel is fast in bfloat16 with
matrix units (AMX) only; with AVX-512 alone, plain products of a block of queries after another take half of
its time, with scores rounded as in the eager attention of ``transformers``.

Knows queries, keys, values and masks. Does not know rows, drafts or the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_MAX_FOLDED = 16  # new tokens; with more, one head alone is enough work for the kernel
_MAX_DRAFTED = 64  # new tokens of a forward that may verify drafts: their kernel does not change here
_BLOCK = 128  # queries
_WORTH_SHARING = 600  # columns of all rows together: below, merging two results costs what reading once saves


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention by the fastest kernel.

    Args:
        query: ``[rows, heads, new, head size]``; the new tokens are the last columns.
        keys: ``[rows, groups, columns, head size]``.
        values: As ``keys``.
        mask: ``[rows, 1, new, columns]``, which masks at least what comes after a token, or the result of
            :func:`fold_mask`; ``None`` for one new token, and with ``is_causal``.
        is_causal: Each token attends to those before it and itself.
        scale: Of the products; by default one by the square root of the head size.

    Returns:
        ``[rows, new, heads, head size]``.
    """
    num_rows, num_heads, num_new, _ = query.shape
    num_groups = keys.shape[1]
    if _is_faster_in_blocks(query):
        return block_attention(query, keys, values, mask, scale=scale).transpose(1, 2)
    is_folded = num_groups < num_heads and num_new <= _MAX_FOLDED and not is_causal
    if is_folded:
        query = query.reshape(num_rows, num_groups, -1, query.shape[-1])
        if mask is not None and mask.shape[2] == num_new:
            mask = fold_mask(mask, num_heads // num_groups)
    attended = scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=num_groups < num_heads and not is_folded,
    )
    return attended.reshape(num_rows, num_heads, num_new, -1).transpose(1, 2)


def fold_mask(mask: Tensor, heads_per_group: int) -> Tensor:
    """The mask of new tokens with the heads of a group folded into them, if :func:`attend` folds them."""
    return mask.repeat(1, 1, heads_per_group, 1) if 1 < mask.shape[2] <= _MAX_FOLDED else mask


def is_worth_sharing(num_rows: int, num_new: int, num_shared: int) -> bool:
    """Whether :func:`attend_shared` is faster than :func:`attend`; wide forwards are not bound by reading."""
    return num_new == 1 and num_rows > 1 and num_rows * num_shared >= _WORTH_SHARING


def attend_shared(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, num_shared: int
) -> Tensor:
    """Attention of one new token in rows whose first columns are the same, which are read once for all rows.

    As :func:`attend`, with a ``mask`` of the columns after the ``num_shared`` ones, in the query's dtype.
    The two parts are merged by the logarithms of their sums of exponentials, as in cascade inference
    (https://flashinfer.ai/2024/02/02/cascade-inference.html): half the time for nine rows of 400 + 64 tokens.
    """
    num_rows, num_heads, _, size = query.shape
    num_groups = keys.shape[1]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    by_row = query.reshape(num_rows, num_groups, -1, size)
    by_group = by_row.transpose(0, 1).reshape(1, num_groups, -1, size)  # all rows are queries of one row
    first, first_sums = kernel(by_group, keys[:1, :, :num_shared], values[:1, :, :num_shared])
    own, own_sums = kernel(by_row, keys[:, :, num_shared:], values[:, :, num_shared:], attn_mask=mask)
    first = first.view(num_groups, num_rows, -1, size).transpose(0, 1)
    first_sums = first_sums.view(num_groups, num_rows, -1).transpose(0, 1)
    own_share = torch.sigmoid(own_sums - first_sums).unsqueeze(-1)
    merged = torch.lerp(first.float(), own.float(), own_share).to(query.dtype)
    return merged.reshape(num_rows, 1, num_heads, size)


def _is_faster_in_blocks(query: Tensor) -> bool:
    return (
        query.shape[2] > _MAX_DRAFTED
        and query.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and torch.cpu._is_avx512_bf16_supported()
        and not torch.cpu._is_amx_tile_supported()
    )


def block_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, scale: float | None = None
) -> Tensor:
    """Scaled dot-product attention in blocks of queries; without a mask, causal.

    Arguments are those of :func:`attend`.

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
