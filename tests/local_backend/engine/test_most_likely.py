"""Which tokens a model takes for likely."""

from __future__ import annotations

import pytest
import torch

from local_backend.engine.choosing import most_likely


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (40_000,), (3, 33, 700), (2, 70, 256), (1, 300, 130), (1, 9, 5_001)])
def test_the_most_likely_token_is_the_first_of_the_largest(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """As ``argmax`` says, ties and impossible tokens included."""
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    coarse = (logits * 2).round()  # many are equally likely
    impossible = torch.full_like(logits, -torch.inf)
    last = logits.clone()
    last[..., -1] = 100.0
    for scores in (logits, coarse, impossible, last):
        assert torch.equal(most_likely(scores), scores.argmax(-1))
