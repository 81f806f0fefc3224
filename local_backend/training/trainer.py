"""The trainer: ``transformers.Trainer`` on packed batches, with speed and quality measured while it trains.

Knows losses, packing and ``transformers.Trainer``. Does not know where trajectories come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from local_backend.training.losses import autoregressive_loss, consistency_loss
from local_backend.training.packing import Example, PackedBatch, PackedForward, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from local_backend.training.examples import NoisyExamples

Measure = Callable[["PreTrainedModel"], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Weights of the losses, 0 for none.

    Raises:
        ValueError: A weight is negative or all are 0.
    """

    global_weight: float = 1.0
    local_weight: float = 0.0
    autoregressive_weight: float = 1.0

    def __post_init__(self) -> None:
        weights = (self.global_weight, self.local_weight, self.autoregressive_weight)
        if min(weights) < 0 or not any(weights):
            raise ValueError(f"weights of losses must be 0 or more and not all 0, got {weights}")

    @property
    def needs_copies(self) -> bool:
        """Whether a loss on noisy copies has weight."""
        return bool(self.global_weight or self.local_weight)


def packed_losses(logits: Tensor, batch: PackedBatch, options: LossOptions) -> dict[str, Tensor]:
    """The losses of a packed batch by name, and their weighted sum as ``"loss"``."""
    losses = {}
    if options.global_weight:
        losses["global"] = consistency_loss(logits, batch.fixed_point_column)
    if options.local_weight:
        losses["local"] = consistency_loss(logits, batch.next_iterate_column)
    if options.autoregressive_weight:
        losses["autoregressive"] = autoregressive_loss(logits, batch.labels)
    weighted = [getattr(options, f"{name}_weight") * loss for name, loss in losses.items()]
    return {**losses, "loss": torch.stack(weighted).sum()}


class ConsistencyTrainer(Trainer):
    """Trains on packed examples: the AR loss on clean text, consistency losses on noisy copies.

    The model may have adapters of ``peft``. When ``Trainer`` evaluates, ``measure`` is called with it, and
    what that returns is logged.

    Raises:
        ValueError: The model does not take masks and positions; says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        arguments: TrainingArguments,
        examples: NoisyExamples,
        losses: LossOptions,
        *,
        pad_id: int = 0,
        measure: Measure | None = None,
        **options: Any,
    ) -> None:
        self._forward = PackedForward(_base_model(model))
        self._loss_options = losses
        self._measure = measure
        self._sums: dict[str, Tensor | float] = {}  # of the losses since the last log
        self._num_summed = 0

        def collate(batch: list[Example]) -> dict[str, Tensor]:
            return pack(batch, pad_id)._asdict()

        super().__init__(
            model=model,
            args=arguments,
            train_dataset=examples,
            eval_dataset=examples if measure else None,  # required by Trainer; `measure` has its own
            data_collator=collate,
            **options,
        )
        self.model_accepts_loss_kwargs = False  # losses are means: Trainer divides by accumulation steps

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        """The weighted sum of the losses of one packed batch."""
        logits, batch = self._forward.learned(model, PackedBatch(**inputs))
        losses = packed_losses(logits, batch, self._loss_options)
        total = losses.pop("loss")
        for name, loss in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + loss.detach()
        self._num_summed += 1
        return total

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the mean of each loss since the last log."""
        if "loss" in logs and self._num_summed:
            logs |= {f"{name}_loss": float(total) / self._num_summed for name, total in self._sums.items()}
            self._sums, self._num_summed = {}, 0
        super().log(logs, start_time)

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Measure the model with ``measure``: tokens per forward and quality on held-out prompts."""
        model = _base_model(self.accelerator.unwrap_model(self.model))
        was_training = model.training
        try:
            with _own_forward(model):
                measured = self._measure(model) if self._measure else {}
        finally:
            model.train(was_training)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def measurements(self) -> list[dict[str, float]]:
        """What was measured so far, with the step of each."""
        return [
            {name.removeprefix("eval_"): value for name, value in record.items() if name != "epoch"}
            for record in self.state.log_history
            if any(name.startswith("eval_") for name in record)
        ]


@contextmanager
def _own_forward(model: Any) -> Iterator[None]:
    """Run the model without the mixed precision that accelerate wrapped around its ``forward``."""
    wrapped = model.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if wrapped is not None:
            model.__dict__["forward"] = wrapped


def _base_model(model: Any) -> PreTrainedModel:
    """The causal language model inside ``peft`` adapters, which stay active; or the model itself."""
    base: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base
