"""The losses of consistency training, as pure functions of logits and the teacher of each position.

Knows tensors only. Which positions are noisy, and which position is the teacher of each, is decided in
:mod:`local_backend.training.packing`.

Teacher and student are the same model in the same forward: the teacher reads right tokens where the student
reads guesses.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # the label of positions without a target, as in torch and transformers
NO_TEACHER = -1  # the index of positions without a teacher


def divergence(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(p || q) of a student's distributions ``q`` from a teacher's ``p``, in nats, over the last axis.

    The student must cover everything the teacher gives weight to. No gradient flows through the teacher.
    """
    log_p, log_q = _log_softmax(teacher_logits).detach(), _log_softmax(student_logits)
    return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def consistency_loss(logits: Tensor, teacher_column: Tensor) -> Tensor:
    """Trains the model to predict from an iterate what it predicts from later, better text.

    The mean over iterates ``y`` and positions ``i`` of ``D(p(. | y'_<i, x) || q(. | y_<i, x))``. Global
    consistency (CLLM, arXiv 2403.00835): the teacher reads the fixed point ``y'``. With copies whose noise
    rises along a window of blocks that is the progressive loss of Jacobi Forcing (arXiv 2512.14681). Local
    consistency (CLLM): the teacher reads the next iterate, or the clean text where that has settled.

    ``teacher_column`` ``[rows, width]`` names each position's teacher in the same row of ``logits``, or
    :data:`NO_TEACHER`; the loss is 0 where no position has one.
    """
    row, column = (teacher_column != NO_TEACHER).nonzero(as_tuple=True)
    if not len(row):
        return _nothing(logits)
    return divergence(logits[row, column], logits[row, teacher_column[row, column]]).mean()


def autoregressive_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy on the clean text, which preserves the model's quality (CLLM, arXiv 2403.00835).

    ``- mean over positions i of log q(y*_i | y*_<i, x)``. A label stands at the position that predicts it, or
    :data:`IGNORED`.
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
