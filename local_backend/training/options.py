"""How a model is tuned, in one place. Knows the options of the parts and no part."""

from __future__ import annotations

from dataclasses import dataclass, field

from local_backend.models.loading import bf16_is_fast
from local_backend.training.noise import NoiseOptions
from local_backend.training.trainer import LossOptions
from local_backend.training.trajectories import CollectOptions


@dataclass(frozen=True)
class TuneOptions:
    """How a model is tuned.

    Attributes:
        num_rounds: How often trajectories are collected anew.
        num_steps: Optimizer steps of each round.
        batch_size: Examples of a forward.
        accumulation_steps: Forwards of an optimizer step.
        learning_rate: At its peak; a warm-up before, a cosine to a tenth behind, in each round.
        lora_rank: Of the adapters that are trained in place of all weights; ``None`` trains all weights.
        bf16: Whether training runs in mixed precision; by default where the machine is fast at it.
        activation_checkpointing: Whether activations are computed anew in the backward pass, to save memory.
        num_held_out: Prompts that are kept for measuring, at most a fifth of them.
        num_evaluations: How often speed and quality are measured in a round.
        save_steps: Steps between two checkpoints.
        seed: Of order, noise and adapters.
        noise, losses, collect: See there.

    Raises:
        ValueError: A number is out of range.
    """

    num_rounds: int = 2
    num_steps: int = 400
    batch_size: int = 16
    accumulation_steps: int = 1
    learning_rate: float = 1e-3
    lora_rank: int | None = None
    bf16: bool = field(default_factory=bf16_is_fast)
    activation_checkpointing: bool = False
    num_held_out: int = 64
    num_evaluations: int = 2
    save_steps: int = 100
    seed: int = 0
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    losses: LossOptions = field(default_factory=LossOptions)
    collect: CollectOptions = field(default_factory=CollectOptions)

    def __post_init__(self) -> None:
        for name in (
            "num_rounds",
            "num_steps",
            "batch_size",
            "accumulation_steps",
            "num_held_out",
            "num_evaluations",
            "save_steps",
            "lora_rank",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")
