"""Attention in blocks is attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from local_backend.kernels.block_attention import block_attention, is_faster_in_blocks


@pytest.mark.parametrize("kind", ["none", "boolean", "added"])
@given(
    groups=st.sampled_from([(1, 1), (2, 1), (6, 2), (3, 3)]),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 300), st.integers(0, 70)),
    scale=st.sampled_from([None, 0.3]),
)
@settings(max_examples=25, deadline=None)
def test_it_attends_to_what_the_mask_says(
    kind: str, groups: tuple[int, int], sizes: tuple[int, int, int], scale: float | None
) -> None:
    """To the last bits of float32, in which rounding hides nothing."""
    num_heads, num_groups = groups
    num_rows, num_new, num_before = sizes
    torch.manual_seed(num_new)
    query = torch.randn(num_rows, num_new, num_heads, 16).transpose(1, 2)  # as a layer has it
    cached = torch.randn(2, num_rows, num_groups, num_before + num_new + 9, 16)  # more than is in use
    keys, values = cached[:, :, :, : num_before + num_new]
    seen = torch.ones(num_new, num_before + num_new, dtype=torch.bool).tril(num_before)
    if kind != "none":  # rows have other lengths: some columns before are empty
        first = torch.randint(0, num_before + 1, (num_rows, 1, 1, 1))
        seen = seen & (torch.arange(num_before + num_new) >= first)
    added = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    mask = {"none": None, "boolean": seen, "added": added}[kind]
    with torch.inference_mode():
        found = block_attention(query, keys, values, mask, scale=scale)
        want = scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, scale=scale, enable_gqa=num_heads != num_groups
        )
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_it_is_as_near_to_float32_as_eager_attention() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 1, 4, 400, 64) * torch.tensor([3.0, 1.0, 1.0]).view(3, 1, 1, 1, 1)
    want = scaled_dot_product_attention(query, keys, values, is_causal=True)
    with torch.inference_mode():
        rounded = [one.to(torch.bfloat16) for one in (query, keys, values)]
        found = block_attention(*rounded, None)
        scores = (rounded[0] @ rounded[1].transpose(2, 3)) * 64**-0.5
        scores = scores.masked_fill(torch.ones(400, 400, dtype=torch.bool).triu_(1), float("-inf"))
        eager = scores.softmax(-1) @ rounded[2]
    assert (found.float() - want).square().mean() <= 1.1 * (eager.float() - want).square().mean()


def test_drafts_and_float32_keep_their_kernel() -> None:
    for query in (torch.zeros(1, 2, 64, 8, dtype=torch.bfloat16), torch.zeros(1, 2, 500, 8)):
        assert not is_faster_in_blocks(query)
