"""Quantiles of answer length from prompt features: a small network, and how it is fitted.

The network predicts several quantiles at once, in ascending order by construction, and is trained with the
pinball loss (Koenker and Bassett, "Regression Quantiles", 1978). So the **maximum** over many answers to a
prompt is learned from one answer to each of many prompts. Knows tensors. Does not know prompts or models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from local_backend.scheduling.lengths import MAX_QUANTILE, Prediction

QUANTILES = (0.1, 0.25, 0.5, 0.75, MAX_QUANTILE)
"""The quantiles predicted; the middle one is the expected length, the last one the maximum."""

_MIDDLE = QUANTILES.index(0.5)
MIN_EXAMPLES = 20
"""Fewer are too few to hold some out and train on the rest."""


def pinball(predicted: Tensor, actual: Tensor, quantiles: Sequence[float] = QUANTILES) -> Tensor:
    """The mean pinball loss over answers and quantiles.

    Args:
        predicted: ``[answers, quantiles]``.
        actual: ``[answers]``.
        quantiles: The quantile of each column.
    """
    missing = actual[:, None] - predicted  # [answers, quantiles]
    levels = torch.tensor(quantiles, dtype=predicted.dtype, device=predicted.device)
    return torch.maximum(levels * missing, (levels - 1) * missing).mean()


def ascending_tokens(raw: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    """Map unconstrained numbers to ascending quantiles in tokens: a first value and positive log-scale steps.

    Args:
        raw: ``[answers, quantiles]``.
        centre: Mean of the logarithms of lengths, a scalar.
        spread: Their standard deviation, a scalar.
    """
    steps = torch.cat([raw[:, :1], functional.softplus(raw[:, 1:])], dim=1).cumsum(1)
    return (centre + spread * steps).clamp(max=_MAX_LOG).exp()


_MAX_LOG = math.log(1e7)  # longer than any answer; prevents overflow to infinity


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a network is fitted.

    Attributes:
        num_hidden: Hidden units; 0 is a linear model.
        num_networks: Networks whose quantiles are averaged, each fitted on a different split.
        dropout: Share of inputs and hidden units dropped while fitting.
        weight_decay: Of AdamW.
        learning_rate: Of AdamW.
        max_steps: Maximum number of steps, each over all examples.
        patience_steps: Fitting stops after this many steps without improvement on held-out examples.
        held_out_share: Share of examples held out for early stopping.
        seed: Of splits, initial weights and dropout.

    Raises:
        ValueError: A number is out of range.
    """

    num_hidden: int = 48
    num_networks: int = 6
    dropout: float = 0.5
    weight_decay: float = 0.02
    learning_rate: float = 3e-3
    max_steps: int = 400
    patience_steps: int = 60
    held_out_share: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_hidden < 0 or min(self.num_networks, self.max_steps, self.patience_steps) < 1:
            raise ValueError(
                "num_hidden must be 0 or more, num_networks, max_steps and patience_steps 1 or more, got "
                f"{self.num_hidden}, {self.num_networks}, {self.max_steps} and {self.patience_steps}"
            )
        if not 0 < self.held_out_share < 1 or not 0 <= self.dropout < 1:
            raise ValueError(
                "held_out_share must lie between 0 and 1 and dropout be 0 or more, below 1, got "
                f"{self.held_out_share} and {self.dropout}"
            )


class QuantileNetwork(nn.Module):
    """Maps features to quantiles in tokens.

    Args:
        num_features: Features of a prompt.
        num_hidden: Hidden units; 0 is a linear model.
        seed: Of the initial weights.
    """

    def __init__(self, num_features: int, num_hidden: int, *, seed: int = 0) -> None:
        super().__init__()
        self.num_hidden = num_hidden
        num_last = num_hidden or num_features
        # Skip torch's initialisation, which would draw from the global generator.
        self.hidden = skip_init(nn.Linear, num_features, num_hidden) if num_hidden else None
        self.last = skip_init(nn.Linear, num_last, len(QUANTILES))
        self.feature_mean: Tensor
        self.feature_scale: Tensor
        self.centre: Tensor
        self.spread: Tensor
        self.register_buffer("feature_mean", torch.zeros(num_features))
        self.register_buffer("feature_scale", torch.ones(num_features))
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            if self.hidden is not None:
                self.hidden.weight.normal_(std=num_features**-0.5, generator=generator)
                self.hidden.bias.zero_()
            self.last.weight.zero_()  # initially predicts the same quantiles for every prompt
            self.last.bias.copy_(
                torch.tensor([-1.3, *[-0.3] * (len(QUANTILES) - 1)])
            )  # quantiles of a normal distribution

    def forward(
        self, features: Tensor, dropout: float = 0.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Quantiles ``[answers, quantiles]`` in tokens, from ``[answers, features]``."""
        # Clipped, so that an outlier prompt does not get an absurd prediction.
        values = _dropped(
            ((features - self.feature_mean) / self.feature_scale).clamp(-6, 6), dropout, generator
        )
        if self.hidden is not None:
            values = _dropped(functional.silu(self.hidden(values)), dropout, generator)
        return ascending_tokens(self.last(values), self.centre, self.spread)


class QuantileEnsemble(nn.Module):
    """Several networks whose quantiles are averaged.

    Args:
        networks: All with the same number of features.
    """

    def __init__(self, networks: Sequence[QuantileNetwork]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        """Quantiles ``[answers, quantiles]`` in tokens, ascending, from ``[answers, features]``."""
        return torch.stack([network(features.float()) for network in self.networks]).mean(0)

    def predictions(self, features: Tensor) -> list[Prediction | None]:
        """One prediction for each line of ``[answers, features]``."""
        return predictions_of(self(features))

    def save(self, path: Path, **about: str) -> None:
        """Write all networks to one file, with metadata ``about`` their features."""
        first = self.networks[0]
        assert isinstance(first, QuantileNetwork)
        shape = {
            "num_networks": len(self.networks),
            "num_hidden": first.num_hidden,
            "num_features": len(first.feature_mean),
        }
        save_file(self.state_dict(), path, metadata={**about, "shape": json.dumps(shape)})

    @classmethod
    def load(cls, path: Path) -> tuple[QuantileEnsemble, dict[str, str]]:
        """Read what :meth:`save` wrote: the networks and the metadata.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It holds no length predictor.
        """
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: give the folder of a predictor that was trained")
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            if "shape" not in about:
                raise ValueError(f"{path} holds no length predictor: expected one that was saved here")
            shape = json.loads(about.pop("shape"))
            ensemble = cls(
                [
                    QuantileNetwork(shape["num_features"], shape["num_hidden"])
                    for _ in range(shape["num_networks"])
                ]
            )
            ensemble.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no dict
        return ensemble, about


def predictions_of(quantiles: Tensor) -> list[Prediction | None]:
    """Convert quantiles ``[answers, quantiles]`` in tokens to predictions."""
    return [Prediction(line[_MIDDLE], line[-1]) for line in quantiles.tolist()]


def fit_quantiles(
    features: Tensor, num_tokens: Sequence[int], options: FitOptions | None = None
) -> QuantileEnsemble:
    """Fit networks, with early stopping on held-out examples.

    Args:
        features: ``[answers, features]``.
        num_tokens: The length of each answer.
        options: How to fit.

    Raises:
        ValueError: There are fewer than :data:`MIN_EXAMPLES` answers, or not one length for each.
    """
    options = options or FitOptions()
    if len(features) != len(num_tokens) or len(features) < MIN_EXAMPLES:
        raise ValueError(
            f"{len(features)} prompts and {len(num_tokens)} lengths: give one length for each of at least "
            f"{MIN_EXAMPLES} prompts"
        )
    lengths = torch.tensor(num_tokens, dtype=torch.float32)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(options.seed))
    num_held_out = max(5, round(options.held_out_share * len(lengths)))
    networks = []
    for number in range(options.num_networks):
        # Each network holds out a different part, so that together they learn from all examples.
        turned = order.roll(number * num_held_out)
        network = QuantileNetwork(features.shape[1], options.num_hidden, seed=options.seed + number)
        held_out, learned = turned[:num_held_out], turned[num_held_out:]
        _fit(
            network,
            features.float(),
            lengths,
            learned,
            held_out=held_out,
            options=options,
            seed=options.seed + number,
        )
        networks.append(network)
    return QuantileEnsemble(networks).eval()


def _fit(
    network: QuantileNetwork,
    features: Tensor,
    lengths: Tensor,
    learned: Tensor,
    *,
    held_out: Tensor,
    options: FitOptions,
    seed: int,
) -> None:
    logarithms = lengths[learned].clamp_min(1).log()
    network.centre.copy_(logarithms.mean())
    network.spread.copy_(logarithms.std().clamp_min(0.05))
    network.feature_mean.copy_(features[learned].mean(0))
    network.feature_scale.copy_(features[learned].std(0).clamp_min(1e-6))
    scale = lengths[learned].mean()
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
    )
    generator = torch.Generator().manual_seed(seed)
    best, best_step = math.inf, 0
    best_state = {name: value.clone() for name, value in network.state_dict().items()}
    for step in range(options.max_steps):
        with torch.no_grad():
            loss = float(pinball(network(features[held_out]), lengths[held_out]))
        if loss < best:
            best, best_step = loss, step
            best_state = {name: value.clone() for name, value in network.state_dict().items()}
        if step - best_step > options.patience_steps:
            break
        optimizer.zero_grad()
        predicted = network(features[learned], options.dropout, generator)
        (pinball(predicted, lengths[learned]) / scale).backward()
        optimizer.step()
    network.load_state_dict(best_state)


def _dropped(values: Tensor, share: float, generator: torch.Generator | None) -> Tensor:
    """Dropout with the given generator, so that a fit does not depend on the global one."""
    if not share:
        return values
    kept = torch.rand(values.shape, generator=generator) >= share
    return values * kept / (1 - share)
