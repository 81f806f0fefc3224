"""Which tokens a model takes for likely."""

from __future__ import annotations

import pytest
import torch

from local_backend.choice import likeliest_tokens, most_likely


def test_the_likeliest_tokens_come_first_with_their_probabilities() -> None:
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0))
    shares = logits.softmax(-1)
    told = likeliest_tokens(logits, 4)
    assert [len(row) for row in told] == [3, 3]
    for row in range(2):
        for column in range(3):
            tokens = [token for token, _ in told[row][column]]
            assert tokens == shares[row, column].argsort(descending=True)[:4].tolist()
            for token, probability in told[row][column]:
                assert probability == pytest.approx(shares[row, column, token].item(), rel=1e-5)


def test_a_small_vocabulary_has_no_more_tokens_than_there_are() -> None:
    ((told,),) = likeliest_tokens(torch.zeros(1, 1, 3), 5)
    assert sorted(told) == [(token, pytest.approx(1 / 3)) for token in range(3)]


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
