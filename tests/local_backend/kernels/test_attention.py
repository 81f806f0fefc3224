"""Attention in blocks, and with keys and values read in place, is attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from local_backend import Engine, SamplingParams
from local_backend.kernels import llama_forward
from local_backend.kernels.attention import attend_shared, block_attention
from tests.tiny import random_llama, tiny_tokenizer


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


@given(
    groups=st.sampled_from([(1, 1), (2, 1), (6, 2), (3, 3)]),
    sizes=st.tuples(st.integers(2, 5), st.integers(1, 90), st.integers(1, 40)),
    is_masked=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_shared_beginning_read_once_gives_the_same(
    groups: tuple[int, int], sizes: tuple[int, int, int], is_masked: bool
) -> None:
    num_heads, num_groups = groups
    num_rows, num_shared, num_own = sizes
    torch.manual_seed(num_shared)
    query = torch.randn(num_rows, 1, num_heads, 16).transpose(1, 2)
    cached = torch.randn(2, num_rows, num_groups, num_shared + num_own + 9, 16)
    cached[:, 1:, :, :num_shared] = cached[:, :1, :, :num_shared]
    keys, values = cached[:, :, :, : num_shared + num_own]
    last = torch.randint(num_shared, num_shared + num_own, (num_rows, 1, 1, 1))
    seen = torch.arange(num_shared + num_own) <= last if is_masked else None
    own = None if seen is None else torch.zeros(seen.shape).masked_fill(~seen, -1e30)[..., num_shared:]
    with torch.inference_mode():
        found = attend_shared(query, keys, values, own, num_shared).transpose(1, 2)
        want = scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, enable_gqa=num_heads != num_groups
        )
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_rows_with_a_shared_beginning_decode_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows join and leave meanwhile, so that what they share changes."""
    shared: list[int] = []
    real = llama_forward.attend_shared
    monkeypatch.setattr(
        llama_forward, "attend_shared", lambda *given: shared.append(given[-1]) or real(*given)
    )
    monkeypatch.setattr(llama_forward, "is_worth_sharing", lambda rows, new, found: new == 1 and found > 0)
    beginning = [11, 12, 13, 14, 15] * 6
    prompts = [[*beginning, 20 + number] for number in range(4)] + [[*beginning[:12], 31, 32]]
    params = [SamplingParams(max_tokens=count, temperature=0.0) for count in (30, 12, 25, 7, 18)]
    with Engine(random_llama(), tiny_tokenizer(), max_rows=4) as engine:
        alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
        assert not shared
        engine.forget_prefixes()
        together = engine.generate(prompts, params)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert {12, 30} <= set(shared)


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
