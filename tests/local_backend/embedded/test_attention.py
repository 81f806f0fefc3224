"""Attention in parts is attention: the same outputs and gradients as where all scores are computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Linear

from local_backend.embedded.attention import attend


def reference(query: Tensor, key: Tensor, value: Tensor, sees: Tensor) -> Tensor:
    """Softmax over what is seen, ``sees`` being ``[rows, columns, columns]``."""
    scores = (query @ key.transpose(2, 3) * 0.5).masked_fill(~sees[:, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def drawn(columns: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, columns, 4, generator=generator).requires_grad_() for _ in range(3)]


def assert_same(states: list[Tensor], mask: Tensor | None, sees: Tensor) -> None:
    output, weights = attend(Linear(1, 1), *states, mask, scaling=0.5)
    assert weights is None
    expected = reference(*states, sees)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    for one, other in zip(
        torch.autograd.grad((output * direction).sum(), states),
        torch.autograd.grad((expected * direction).sum(), states),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def additive(sees: Tensor) -> Tensor:
    return torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[:, None]


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 30])
def test_without_a_mask_each_column_sees_those_before_it(columns: int) -> None:
    sees = torch.ones(columns, columns, dtype=torch.bool).tril().repeat(2, 1, 1)
    assert_same(drawn(columns, columns), None, sees)


@given(seed=st.integers(0, 1000), width=st.integers(1, 20), hanging=st.integers(0, 25))
def test_columns_see_what_the_mask_lets_them_and_those_that_hang_themselves(
    seed: int, width: int, hanging: int
) -> None:
    """Whatever is seen, as long as everybody sees something; also where nobody sees the last columns."""
    generator = torch.Generator().manual_seed(seed)
    sees = torch.rand(2, width + hanging, width, generator=generator) < 0.5
    sees[:, :, 0] = True
    own = torch.eye(width + hanging, dtype=torch.bool)[:, width:].repeat(2, 1, 1)
    assert_same(drawn(width + hanging, seed), additive(sees), torch.cat([sees, own], 2))


def test_who_hooks_into_the_layer_gets_the_weights() -> None:
    layer = Linear(1, 1)
    layer.register_forward_hook(lambda *_: None)
    query, key, value = drawn(9, 0)
    sees = torch.ones(9, 9, dtype=torch.bool).tril().repeat(2, 1, 1)
    for mask in (None, additive(sees)):
        output, weights = attend(layer, query, key, value, mask, scaling=0.5)
        assert weights is not None
        torch.testing.assert_close((weights @ value).transpose(1, 2), output)
        torch.testing.assert_close(output, reference(query, key, value, sees), atol=1e-5, rtol=1e-5)
