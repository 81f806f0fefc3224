"""Quantiles of answer length from prompt features: a small network, and how it is fitted.

The network predicts several quantiles at once, in ascending order by construction, and is trained with the
pinball loss (Koenker and Bassett, "Regression Quantiles", 1978). So the **maximum** over many answers to a
prompt is learned from one answer to each of many prompts. Knows tensors. Does not know prompts or models.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from local_backend.scheduling.lengths import MAX_QUANTILE, Prediction

QUANTILES = (0.1, 0.25, 0.5, 0.75, MAX_QUANTILE)
"""The quantiles predicted; the middle one is the expected length, the last one the maximum."""

MIN_EXAMPLES = 20
"""Fewer are too few to hold some out and train on the rest."""

_MIDDLE = QUANTILES.index(0.5)
_NUM_HIDDEN = 48
_NUM_NETWORKS = 6  # each fitted on a different split; their quantiles are averaged
_DROPOUT = 0.5  # of inputs and of hidden units
_LEARNING_RATE, _WEIGHT_DECAY = 3e-3, 0.02
# Steps over all examples, at most; and those without improvement on held-out examples that end the fit.
_MAX_STEPS, _PATIENCE_STEPS = 400, 60
_HELD_OUT_SHARE = 0.2


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


class QuantileNetwork(nn.Module):
    """Maps features to quantiles in tokens.

    Args:
        num_features: Features of a prompt.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        last = nn.Linear(_NUM_HIDDEN, len(QUANTILES))
        nn.init.zeros_(last.weight)  # initially predicts the same quantiles for every prompt
        with torch.no_grad():  # quantiles of a normal distribution
            last.bias.copy_(torch.tensor([-1.3, *[-0.3] * (len(QUANTILES) - 1)]))
        self.layers = nn.Sequential(
            nn.Dropout(_DROPOUT), nn.Linear(num_features, _NUM_HIDDEN), nn.SiLU(), nn.Dropout(_DROPOUT), last
        )
        self.feature_mean: Tensor
        self.feature_scale: Tensor
        self.centre: Tensor
        self.spread: Tensor
        self.register_buffer("feature_mean", torch.zeros(num_features))
        self.register_buffer("feature_scale", torch.ones(num_features))
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        """Quantiles ``[answers, quantiles]`` in tokens, from ``[answers, features]``."""
        # Clipped, so that an outlier prompt does not get an absurd prediction.
        values = ((features - self.feature_mean) / self.feature_scale).clamp(-6, 6)
        return ascending_tokens(self.layers(values), self.centre, self.spread)


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
        return [Prediction(line[_MIDDLE], line[-1]) for line in self(features).tolist()]

    def save(self, path: Path, **about: str) -> None:
        """Write all networks to one file, with metadata ``about`` their features."""
        save_file(self.state_dict(), path, metadata=about)

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
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        means = [value for name, value in state.items() if name.endswith(".feature_mean")]
        ensemble = cls([QuantileNetwork(len(mean)) for mean in means])
        try:
            ensemble.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(f"{path} holds no length predictor of this version: train it again") from error
        return ensemble.eval(), about


def fit_quantiles(features: Tensor, num_tokens: Sequence[int], *, seed: int = 0) -> QuantileEnsemble:
    """Fit networks, with early stopping on held-out examples.

    Args:
        features: ``[answers, features]``.
        num_tokens: The length of each answer.
        seed: Of splits, initial weights and dropout.

    Raises:
        ValueError: There are fewer than :data:`MIN_EXAMPLES` answers, or not one length for each.
    """
    if len(features) != len(num_tokens) or len(features) < MIN_EXAMPLES:
        raise ValueError(
            f"{len(features)} prompts and {len(num_tokens)} lengths: give one length for each of at least "
            f"{MIN_EXAMPLES} prompts"
        )
    features, lengths = features.float(), torch.tensor(num_tokens, dtype=torch.float32)
    num_held_out = max(5, round(_HELD_OUT_SHARE * len(lengths)))
    networks = []
    with torch.random.fork_rng(devices=[]):  # a fit neither depends on other random draws nor changes them
        torch.manual_seed(seed)
        order = torch.randperm(len(lengths))
        for number in range(_NUM_NETWORKS):
            # Each network holds out a different part, so that together they learn from all examples.
            held_out, learned = order.roll(number * num_held_out).tensor_split([num_held_out])
            networks.append(
                _fitted(features[learned], lengths[learned], features[held_out], lengths[held_out])
            )
    return QuantileEnsemble(networks).eval()


def _fitted(
    features: Tensor, lengths: Tensor, held_features: Tensor, held_lengths: Tensor
) -> QuantileNetwork:
    """A network fitted to ``features`` and ``lengths``, as it was when it was best on those held out."""
    network = QuantileNetwork(features.shape[1])
    logarithms = lengths.clamp_min(1).log()
    network.centre.copy_(logarithms.mean())
    network.spread.copy_(logarithms.std().clamp_min(0.05))
    network.feature_mean.copy_(features.mean(0))
    network.feature_scale.copy_(features.std(0).clamp_min(1e-6))
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    best, best_step, best_state = math.inf, 0, copy.deepcopy(network.state_dict())
    for step in range(_MAX_STEPS):
        with torch.no_grad():
            loss = float(pinball(network.eval()(held_features), held_lengths))
        if loss < best:
            best, best_step, best_state = loss, step, copy.deepcopy(network.state_dict())
        if step - best_step > _PATIENCE_STEPS:
            break
        optimizer.zero_grad()
        (pinball(network.train()(features), lengths) / lengths.mean()).backward()
        optimizer.step()
    network.load_state_dict(best_state)
    return network
