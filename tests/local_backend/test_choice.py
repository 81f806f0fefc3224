"""Which tokens a model takes for likely."""

from __future__ import annotations

import pytest
import torch

from local_backend.choice import most_likely, with_candidates
from local_backend.draft import Draft, Outcome


def asking(num_candidates: int) -> Draft:
    """Tokens 5 and, behind it, 6; the questions 8 and 9 behind the root and behind each token."""
    return Draft(
        (5, 6, 8, 9, 8, 9, 8, 9),
        (-1, 0, -1, -1, 0, 0, 1, 1),
        num_candidates=num_candidates,
        questions=frozenset((8, 9)),
    )


def test_what_is_likely_on_the_last_questions_is_told() -> None:
    """Rows that end at different places, one of which asks nothing."""
    logits = torch.randn(4, 9, 11, generator=torch.Generator().manual_seed(0))
    shares = logits.softmax(-1)
    ends = [((), 2), ((0,), 4), ((0, 1), 6)]
    outcomes = [Outcome(accepted, (1,), (), asking(4)) for accepted, _ in ends]
    outcomes.insert(1, Outcome((), (1,), (), Draft.chain([8, 9])))  # here they are tokens like others
    told = with_candidates(outcomes, logits)
    assert told[1].candidates == {}
    for row, (_, place) in zip((0, 2, 3), ends, strict=True):
        assert list(told[row].candidates) == [8, 9]
        for column, said in enumerate(told[row].candidates.values(), 1 + place):
            tokens = [token for token, _ in said]
            assert tokens == shares[row, column].argsort(descending=True)[:4].tolist()
            for token, probability in said:
                assert probability == pytest.approx(shares[row, column, token].item(), rel=1e-5)


def test_a_small_vocabulary_has_no_more_tokens_than_there_are() -> None:
    (told,) = with_candidates([Outcome((), (1,), (), asking(5))], torch.zeros(1, 9, 3))
    for said in told.candidates.values():
        assert sorted(said) == [(token, pytest.approx(1 / 3)) for token in range(3)]


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
