"""The output layer and the loss in one: logits of all positions never exist at once.

Knows hidden states and target distributions. Where targets come from, and which positions have one, is
decided in :mod:`local_backend.training.packing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from local_backend.engine.choosing import most_likely

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Targets(NamedTuple):
    """What positions are to predict.

    Attributes:
        token_ids: The likely tokens of each position; ``[positions, likely]``.
        probabilities: Theirs, which sum to 1; ``[positions, likely]``.
        weights: Of the positions in the loss; ``[positions]``.
    """

    token_ids: Tensor
    probabilities: Tensor
    weights: Tensor


class Head:
    """What a causal language model computes after its layers: the output layer and any scaling behind it.

    Raises:
        ValueError: The model has no linear output layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self.body: Any = model.base_model
        linear: Any = model.get_output_embeddings()
        if not isinstance(linear, torch.nn.Linear):
            raise ValueError(f"{type(model).__name__} has no linear output layer, so it cannot be trained")
        self.linear = linear
        # A GPU computes wide products well; on a CPU, memory that is used again is faster than fresh memory.
        self.num_rows = 4096 if model.device.type == "cuda" else 512

    def finished(self, scores: Tensor) -> Tensor:
        """Logits from the output layer's ``scores``, as the model's own code makes them (a cap, a scale)."""
        nothing = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=scores[None, :, :1])
        with _returning(self.body, nothing), _returning(self.linear, scores[None]):
            logits: Tensor = self._model(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits[0]
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[positions, vocabulary]`` of hidden states ``[positions, size]``."""
        return self.finished(self.linear(hidden))

    def loss(self, hidden: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """The cross-entropy with the targets, summed with their weights, and the likeliest tokens.

        Args:
            hidden: ``[positions, size]``.
            targets: Of each position.

        Returns:
            The loss, and token ids ``[positions]``.
        """
        loss, predicted = _Loss.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            hidden, self.linear.weight, self.linear.bias, self, targets, torch.is_grad_enabled()
        )
        return loss, predicted


@contextmanager
def _returning(module: Any, output: Any) -> Iterator[None]:
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.forward


class _Loss(torch.autograd.Function):
    """Computes the gradients of each part of the positions together with its loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        targets: Targets,
        learns: bool,  # autograd passes arguments by position
    ) -> tuple[Tensor, Tensor]:
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        matrix, states = weight.to(dtype), hidden.to(dtype)
        added = None if bias is None else bias.to(dtype)
        by_hidden = torch.empty_like(states)
        by_weight = torch.zeros_like(weight) if weight.requires_grad else None
        by_bias = torch.zeros_like(bias) if bias is not None and bias.requires_grad else None
        total = hidden.new_zeros((), dtype=torch.float32)
        predicted = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        for first in range(0, len(hidden), head.num_rows):
            part = slice(first, first + head.num_rows)
            some = Targets(*(tensor[part] for tensor in targets))
            scores = functional.linear(states[part], matrix, added)
            loss, by_scores = _part(scores, head, some, predicted[part])
            total += loss
            if not learns:
                continue
            torch.mm(by_scores, matrix, out=by_hidden[part])
            if by_weight is not None and dtype == weight.dtype:
                by_weight.addmm_(by_scores.t(), states[part])
            elif by_weight is not None:
                by_weight += by_scores.t() @ states[part]
            if by_bias is not None:
                by_bias += by_scores.sum(0)
        ctx.save_for_backward(by_hidden.to(hidden.dtype), by_weight, by_bias)
        ctx.mark_non_differentiable(predicted)
        return total, predicted

    @staticmethod
    def backward(ctx: Any, *by_outputs: Tensor) -> tuple[Tensor | None, ...]:
        by_loss = by_outputs[0]
        by_inputs = (None if tensor is None else tensor * by_loss for tensor in ctx.saved_tensors)
        return (*by_inputs, None, None, None)


def _part(scores: Tensor, head: Head, targets: Targets, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of some positions and its gradient by their scores; writes what they predict."""
    with torch.enable_grad():
        leaf = scores.requires_grad_()
        logits = head.finished(leaf)
    is_as_it_was = logits.shape == leaf.shape and logits.data_ptr() == leaf.data_ptr()
    values = logits.detach()
    predicted.copy_(most_likely(values))
    by_logits = torch.softmax(values, -1, dtype=torch.float32)
    # Some models give -inf to tokens that must never be emitted; times a probability of 0 that is not 0.
    likely = values.gather(1, targets.token_ids).float().clamp(min=torch.finfo(torch.float32).min)
    at = predicted[:, None]  # where the probability is no rounding error
    normalizer = (values.gather(1, at).float() - by_logits.gather(1, at).log())[:, 0]
    loss = ((normalizer - (targets.probabilities * likely).sum(-1)) * targets.weights).sum()
    by_logits.scatter_add_(1, targets.token_ids, -targets.probabilities)
    by_scores = by_logits.mul_(targets.weights[:, None]).to(scores.dtype)
    if not is_as_it_was:
        (by_scores,) = torch.autograd.grad(logits, leaf, by_scores.view_as(logits))
    return loss, by_scores
