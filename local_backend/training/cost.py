"""What a training will cost, told before it starts. Knows how to time one step; changes no weight."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from local_backend.models.loading import bf16_is_fast
from local_backend.training.packing import PackedForward, pack
from local_backend.training.trainer import LossOptions, base_model_of, packed_losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from local_backend.training.examples import NoisyExamples

_BYTES_PER_TRAINED_WEIGHT = 12  # gradient and both moments of AdamW, in float32
_FLOPS_PER_WEIGHT_AND_TOKEN = 6  # forward and backward


@dataclass(frozen=True, slots=True)
class Cost:
    """What a training will take.

    Attributes:
        num_steps: Optimizer steps.
        tokens_per_step: Packed tokens, padding aside.
        flops: Of all steps.
        seconds: Of all steps, from one that was timed.
        state_bytes: Weights, gradients and optimizer; activations come on top.
    """

    num_steps: int
    tokens_per_step: float
    flops: float
    seconds: float
    state_bytes: int

    def __str__(self) -> str:
        minutes = self.seconds / 60
        return (
            f"{self.num_steps} steps of about {self.tokens_per_step:,.0f} tokens: {self.flops:.1e} FLOPs, "
            f"about {minutes:.0f} min here, {self.state_bytes / 2**20:,.0f} MiB for weights and optimizer"
        )


def estimate_cost(
    model: PreTrainedModel,
    examples: NoisyExamples,
    losses: LossOptions,
    *,
    num_steps: int,
    batch_size: int,
    accumulation_steps: int = 1,
    bf16: bool | None = None,
) -> Cost:
    """Time one forward and backward, and reckon the rest from it.

    Args:
        model: As it will be trained, adapters included.
        examples: What it will be trained on.
        losses: The losses.
        num_steps: Optimizer steps.
        batch_size: Examples of a forward.
        accumulation_steps: Forwards of a step.
        bf16: Whether they run in mixed precision; ``None`` is where the machine is fast at it.
    """
    base = base_model_of(model)
    forward = PackedForward(base)
    some = [examples[number] for number in range(min(batch_size, len(examples)))]
    device = base.device
    batch = pack(some).to(device)

    is_mixed = bf16_is_fast() if bf16 is None else bf16

    def step() -> float:
        started = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_mixed):
            logits = forward(model, batch)
        packed_losses(logits, batch, losses)["loss"].backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    rng_state = torch.get_rng_state()
    was_training = model.training
    model.train()  # where activations are computed anew, that is so in training alone
    step()  # warm-up
    seconds = step()
    model.train(was_training)
    model.zero_grad(set_to_none=True)
    torch.set_rng_state(rng_state)
    tokens_per_step = examples.mean_tokens() * batch_size * accumulation_steps
    weights = list(model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    return Cost(
        num_steps=num_steps,
        tokens_per_step=tokens_per_step,
        flops=_FLOPS_PER_WEIGHT_AND_TOKEN * sum(w.numel() for w in weights) * tokens_per_step * num_steps,
        seconds=seconds * accumulation_steps * num_steps,
        state_bytes=sum(w.numel() * w.element_size() for w in weights) + _BYTES_PER_TRAINED_WEIGHT * trained,
    )
