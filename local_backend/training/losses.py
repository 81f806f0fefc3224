"""The losses of consistency training, as pure functions of logits and the teacher of each position.

Knows tensors only. Which positions are noisy, and which position is the teacher of each, is decided in
:mod:`local_backend.training.packing`.

Everywhere ``p`` is the teacher's distribution and ``q`` the student's; no gradient flows through ``p``. Both
come from the same model in the same forward: the teacher reads right tokens where the student reads guesses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]

IGNORED = -100  # the label of positions without a target, as in torch and transformers
NO_TEACHER = -1  # the index of positions without a teacher


def forward_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(p || q): the student must cover everything the teacher gives weight to.

    Args:
        student_logits: ``[..., vocabulary]``.
        teacher_logits: ``[..., vocabulary]``.

    Returns:
        ``[...]``, in nats.
    """
    log_p, log_q = _log_softmax(teacher_logits).detach(), _log_softmax(student_logits)
    return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(q || p): the student may drop some of what the teacher gives weight to. Shapes as above."""
    log_p, log_q = _log_softmax(teacher_logits).detach(), _log_softmax(student_logits)
    return functional.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)


def jsd(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2: Jensen-Shannon. Shapes as above."""
    log_p, log_q = _log_softmax(teacher_logits).detach(), _log_softmax(student_logits)
    log_m = torch.logaddexp(log_p, log_q) - torch.log(log_p.new_tensor(2.0))
    kl_p = functional.kl_div(log_m, log_p, reduction="none", log_target=True).sum(-1)
    kl_q = functional.kl_div(log_m, log_q, reduction="none", log_target=True).sum(-1)
    return (kl_p + kl_q) / 2


_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
}


def divergence_of(name: Divergence) -> Callable[[Tensor, Tensor], Tensor]:
    """The divergence of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in _DIVERGENCES:
        raise ValueError(f"no divergence is named {name!r}; there are {', '.join(_DIVERGENCES)}")
    return _DIVERGENCES[name]


def agreement_loss(logits: Tensor, agrees_with: Tensor, divergence: Divergence = "forward_kl") -> Tensor:
    """Mean divergence of positions from their teachers in the same row.

    Args:
        logits: ``[rows, width, vocabulary]``.
        agrees_with: For each position the column of its teacher, :data:`NO_TEACHER` where it has none;
            ``[rows, width]``.
        divergence: How to compare two distributions.

    Returns:
        A scalar; 0 where no position has a teacher.
    """
    row, column = (agrees_with != NO_TEACHER).nonzero(as_tuple=True)
    if not len(row):
        return _nothing(logits)
    teacher = logits[row, agrees_with[row, column]]
    return divergence_of(divergence)(logits[row, column], teacher).mean()


def global_consistency_loss(
    logits: Tensor, fixed_point_column: Tensor, divergence: Divergence = "forward_kl"
) -> Tensor:
    """Trains the model to predict from any iterate what it predicts from the fixed point.

    ``mean over iterates y and positions i of D(p(. | y*_<i, x) || q(. | y_<i, x))``, where ``y*`` is the
    fixed point of the block (CLLM, arXiv 2403.00835, equation of the global consistency loss). With copies
    whose noise rises along a window of blocks it is the progressive consistency loss of Jacobi Forcing
    (arXiv 2512.14681).

    Args:
        logits: ``[rows, width, vocabulary]``.
        fixed_point_column: For each position of an iterate the column of the clean text that predicts the
            same token, :data:`NO_TEACHER` elsewhere; ``[rows, width]``.
        divergence: D.
    """
    return agreement_loss(logits, fixed_point_column, divergence)


def local_consistency_loss(
    logits: Tensor, next_iterate_column: Tensor, divergence: Divergence = "forward_kl"
) -> Tensor:
    """Trains the model to predict from an iterate what it predicts one iteration later.

    ``mean over neighbouring iterates and positions i of D(p(. | y(k+1)_<i, x) || q(. | y(k)_<i, x))`` (CLLM,
    arXiv 2403.00835, local consistency loss). Positions settled by then have the clean text as teacher.

    Args:
        logits: ``[rows, width, vocabulary]``.
        next_iterate_column: For each position of an iterate the column of the next iterate, or of the clean
            text, that predicts the same token, :data:`NO_TEACHER` elsewhere; ``[rows, width]``.
        divergence: D.
    """
    return agreement_loss(logits, next_iterate_column, divergence)


def autoregressive_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy on the clean text, which preserves the model's quality (CLLM, arXiv 2403.00835).

    ``- mean over positions i of log q(y*_i | y*_<i, x)``.

    Args:
        logits: ``[rows, width, vocabulary]``.
        labels: Target token of each position, :data:`IGNORED` where there is none; ``[rows, width]``. Not
            shifted: a label stands at the position that predicts it.

    Returns:
        A scalar; 0 where nothing is labelled.
    """
    row, column = (labels != IGNORED).nonzero(as_tuple=True)
    if not len(row):
        return _nothing(logits)
    return functional.cross_entropy(logits[row, column].float(), labels[row, column])


def _log_softmax(logits: Tensor) -> Tensor:
    # Some models give -inf to tokens that must never be emitted. Clamped, so that tokens impossible for both
    # student and teacher add 0 instead of inf - inf.
    return functional.log_softmax(logits.float(), dim=-1).clamp(min=torch.finfo(torch.float32).min)


def _nothing(logits: Tensor) -> Tensor:
    """A loss of 0 in the graph of the logits, whatever their values."""
    return logits[:0].sum()
