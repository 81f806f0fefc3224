"""What a step of the plain stage minimizes: the learned tokens' cross-entropy, and where the circuits point.

Knows batches and the model's forward. Does not know examples, optimizers or the consistency stage's losses.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from local_backend.embedded.batches import NUM_POINTED, fast_precision
from local_backend.embedded.circuits import fits
from local_backend.embedded.quoting import FIRST_POINTED, POINTING_HEADS, POINTING_LAYER

POINTING_WEIGHT = 2.0


def only_quoted(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with nothing to learn but the quoted tokens: all that circuits can know."""
    targets = torch.full_like(batch["targets"], -100)
    quotations = batch.get("quotations", torch.zeros(0, 4, dtype=torch.long))
    for row, said, _, count in quotations.tolist():
        columns = slice(said, said + count)
        targets[row, columns] = batch["targets"][row, columns]
    return {**batch, "targets": targets}


def loss_of(model: LlamaForCausalLM, batch: dict[str, Tensor]) -> Tensor:
    """Weighted mean cross-entropy over the learned positions, and the loss of the pointing heads."""
    attended: list[Tensor] = []
    pointing = model.model.layers[POINTING_LAYER].self_attn if "quotations" in batch and fits(model) else None
    hook = pointing and pointing.register_forward_hook(lambda *call: attended.append(call[-1][1]))
    with fast_precision():
        positions = {"position_ids": batch["position_ids"]} if "attention_mask" in batch else {}
        hidden = model.model(
            input_ids=batch["input_ids"],
            attention_mask=batch.get("attention_mask"),
            use_cache=False,
            **positions,
        ).last_hidden_state
        learned = batch["targets"] != -100
        logits = model.lm_head(hidden[learned])  # [learned positions, vocabulary]
    losses = functional.cross_entropy(logits.float(), batch["targets"][learned], reduction="none")
    weights = batch["weights"][learned]
    loss = (losses * weights).sum() / weights.sum().clamp(min=1.0)
    if hook is not None:
        hook.remove()
        loss = loss + POINTING_WEIGHT * pointing_loss(attended[0], batch)
    return loss


def pointing_loss(attended: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """How far the pointing heads are from the first tokens of the sentence to quote, and then from silence.

    Args:
        attended: What the heads of their layer attend to, ``[rows, heads, width, width]``.
        batch: With ``quotations``, see :func:`~local_backend.embedded.batches.collate`.
    """
    heads = attended[:, :POINTING_HEADS].float()
    row, said, taken, _ = batch["quotations"].T
    steps = torch.arange(NUM_POINTED)
    found = heads[row[:, None], :, said[:, None] + steps, taken[:, None] + steps]  # [count, pointed, heads]
    is_pointed = steps[:, None] >= torch.tensor(FIRST_POINTED)
    found = found[:, is_pointed]
    is_silent = batch["targets"] != -100
    is_silent[row[:, None], said[:, None] + steps] = False
    nothing = (heads * batch["is_nothing"][:, None, None]).sum(-1)  # [rows, heads, width]
    silent = nothing.transpose(1, 2)[is_silent]
    return -((found + 1e-3).log().mean() + 0.5 * (silent + 1e-3).log().mean())


__all__ = ["loss_of", "only_quoted", "pointing_loss"]
