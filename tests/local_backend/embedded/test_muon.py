"""Muon: orthogonal updates, and a state that goes on where it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from local_backend.embedded.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(2, 8, 8), (3, 6, 20), (3, 20, 6)])
def test_an_update_is_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonalize(matrices))
    # The smallest of a square random matrix is next to nothing, and is not lifted all the way.
    assert singular.max() < 1.3
    assert singular.quantile(0.2) > 0.5


def test_it_agrees_with_torchs_own() -> None:
    """That computes in bfloat16, so to three digits."""
    start = torch.randn(12, 20, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    one = Muon([ours], learning_rate=0.02, weight_decay=0.1)
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for parameter in (ours, theirs):
            parameter.grad = torch.sin(parameter.detach())
        one.step()
        other.step()
    torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=0)


def test_it_goes_on_from_a_checkpoint() -> None:
    def steps(optimizer: Muon, matrix: Tensor, count: int) -> None:
        for _ in range(count):
            matrix.grad = torch.cos(matrix.detach())
            optimizer.step()

    first, second = (torch.nn.Parameter(torch.eye(4, 6)) for _ in range(2))
    undisturbed = Muon([first], 0.01)
    steps(undisturbed, first, 6)
    stopped = Muon([second], 0.01)
    steps(stopped, second, 3)
    resumed = Muon([second], 0.01)
    resumed.load_state_dict(stopped.state_dict())
    steps(resumed, second, 3)
    assert torch.equal(first, second)


def test_only_matrices_are_taken() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))], 0.01)
