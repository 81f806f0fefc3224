"""The optimizers of the build: one for the layers' matrices, one for the rest, one for the circuits.

Knows parameters and which of their weights the circuits hold. Does not know examples or losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from local_backend.embedded.circuits import circuit_weights, fits, held_weights
from local_backend.embedded.muon import Muon


@dataclass(frozen=True)
class LearningRates:
    """Peaks, by what is updated.

    Attributes:
        matrices: Of the layers, by Muon.
        embeddings, head: By AdamW; norms learn as the head does.
        circuits: The share of itself by which a circuit's weight changes in a step.
        circuits_first: The same while the circuits are tuned first.
    """

    matrices: float = 3e-3
    embeddings: float = 2.5e-3
    head: float = 2.5e-3
    circuits: float = 5e-4
    circuits_first: float = 4e-3


class RelativeAdam:
    """Adam on the logarithms of weights: each changes by a share of itself, none changes its sign.

    What was written with a meaning keeps it: a gain grows or falls, and what was zero stays zero.

    Args:
        weights: Parameters, each with a mask of what is updated.
        betas: Of the running means.
    """

    def __init__(
        self, weights: Sequence[tuple[Tensor, Tensor]], betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        self._weights = [(parameter, mask.flatten().nonzero()[:, 0]) for parameter, mask in weights]
        self._betas = betas
        self._means = [torch.zeros(2, len(places)) for _, places in self._weights]
        self._num_steps = 0

    @torch.no_grad()
    def step(self, learning_rate: float, gradients: Sequence[Tensor | None]) -> None:
        """Update by the gradients with respect to the parameters."""
        self._num_steps += 1
        first, second = self._betas
        for (parameter, places), means, gradient in zip(self._weights, self._means, gradients, strict=True):
            if gradient is None:
                continue
            values = parameter.view(-1)[places]
            relative = gradient.view(-1)[places] * values
            means[0].lerp_(relative, 1 - first)
            means[1].lerp_(relative.square(), 1 - second)
            direction = means[0] / (1 - first**self._num_steps)
            size = (means[1] / (1 - second**self._num_steps)).sqrt()
            parameter.view(-1)[places] = values * (-learning_rate * direction / (size + 1e-12)).exp()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"means": self._means, "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's."""
        self._num_steps = state["num_steps"]
        for means, kept in zip(self._means, state["means"], strict=True):
            means.copy_(kept)


class Optimizers:
    """Muon for the weight matrices of the layers, AdamW for embeddings, head and norms, as one.

    On this model Muon learns the topics in a third of the steps AdamW takes. What the circuits hold is left
    out of both, and changes by :class:`RelativeAdam` alone.
    """

    def __init__(
        self, model: LlamaForCausalLM, rates: LearningRates, *, weight_decay: float, num_tuning_steps: int
    ) -> None:
        self._parameters = dict(model.named_parameters())
        matrices = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2]
        embedding = model.model.embed_tokens.weight
        apart = {id(parameter) for parameter in (embedding, *matrices)}
        others = [parameter for parameter in model.parameters() if id(parameter) not in apart]
        self._muon = Muon(matrices, rates.matrices, weight_decay)
        self._adam = torch.optim.AdamW(
            [
                {"params": [embedding], "peak": rates.embeddings},
                {"params": others, "peak": rates.head},
            ],
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        self._held = held_weights(model) if fits(model) else {}
        circuits = circuit_weights(model) if fits(model) else {}
        self._tuned = list(circuits)
        self._circuits = RelativeAdam([(self._parameters[name], mask) for name, mask in circuits.items()])
        self._rates, self._num_tuning_steps = rates, num_tuning_steps
        self._summed: dict[str, Tensor] = {}
        self._of_circuits: list[Tensor | None] = [None] * len(self._tuned)

    @torch.no_grad()
    def collect(self, *, for_circuits: bool = True) -> None:
        """Take the gradients of one loss: each loss counts as much as the others, however steep it is.

        The losses of a step are of different kinds; added as they are, the steepest alone would be learned.

        Args:
            for_circuits: Whether the loss tunes the circuits, too. Where nothing is to be found or copied
                they would only be weakened.
        """
        for place, name in enumerate(self._tuned):
            gradient = self._parameters[name].grad
            if gradient is not None and for_circuits:
                summed = self._of_circuits[place]
                self._of_circuits[place] = gradient.clone() if summed is None else summed + gradient
        gradients = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                held = self._held.get(name)
                gradients[name] = parameter.grad if held is None else parameter.grad.masked_fill(held, 0.0)
            parameter.grad = None
        length = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        for name, gradient in gradients.items():
            share = gradient * (1 / (length + 1e-9))
            self._summed[name] = self._summed[name] + share if name in self._summed else share

    @torch.no_grad()
    def step(self, number: int, rate: float) -> None:
        """Update by what was collected, with ``rate`` times the peaks of the learning rates."""
        rates = self._rates
        if number >= self._num_tuning_steps:
            self._step_others(rate)
            self._circuits.step(rate * rates.circuits, self._of_circuits)
        else:
            left = 1 - number / self._num_tuning_steps
            self._circuits.step(rates.circuits_first * left + rates.circuits, self._of_circuits)
        self._summed, self._of_circuits = {}, [None] * len(self._tuned)

    def _step_others(self, rate: float) -> None:
        before = {name: self._parameters[name].clone() for name in self._held}
        for name, parameter in self._parameters.items():
            parameter.grad = self._summed.get(name)
        self._muon.learning_rate = self._rates.matrices * rate
        for group in self._adam.param_groups:
            group["lr"] = group["peak"] * rate
        self._muon.step()
        self._adam.step()
        self._muon.zero_grad()
        self._adam.zero_grad(set_to_none=True)
        for name, mask in self._held.items():
            self._parameters[name].copy_(torch.where(mask, before[name], self._parameters[name]))

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps."""
        return [self._muon.state_dict(), self._adam.state_dict(), self._circuits.state_dict()]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from a checkpoint's."""
        muon, adam, circuits = states
        self._muon.load_state_dict(muon)
        self._adam.load_state_dict(adam)
        self._circuits.load_state_dict(circuits)


__all__ = ["LearningRates", "Optimizers", "RelativeAdam"]
