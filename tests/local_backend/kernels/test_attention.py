"""Attention in blocks, and with keys and values read in place, is attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedTokenizerBase

from local_backend import Engine
from local_backend.kernels.attention import IN_PLACE, block_attention, grouped_attention
from tests.local_backend.models.architectures import random_model


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


@pytest.mark.parametrize("num_new", [1, 5, 16, 17])
def test_attention_in_place_says_what_attention_with_copies_says(num_new: int) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, num_new, 6, 8).transpose(1, 2), torch.randn(2, 2, 20, 8)
    value = torch.randn(2, 2, 20, 8)
    mask = torch.zeros(2, 1, num_new, 20).masked_fill(torch.rand(2, 1, num_new, 20) < 0.3, -1e9)
    module = torch.nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]  # what transformers reads off a layer
    output, _ = grouped_attention(module, query, key, value, mask, scaling=0.3)
    copies = [states.repeat_interleave(3, dim=1) for states in (key, value)]
    want = torch.nn.functional.scaled_dot_product_attention(query, *copies, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(output, want.transpose(1, 2))


def test_only_a_model_with_grouped_heads_is_told_to(tokenizer: PreTrainedTokenizerBase) -> None:
    grouped, plain = random_model("llama"), random_model("gpt_neox")
    for model in (grouped, plain):
        Engine(model, tokenizer).close()
    assert grouped.config._attn_implementation == IN_PLACE
    assert plain.config._attn_implementation == "sdpa"
