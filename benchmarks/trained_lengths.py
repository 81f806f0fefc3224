"""Predicts answer lengths by small networks over features of the prompt, and logs lengths to fit them to.

Knows a ``transformers`` model's hidden states. Does not know how networks are fitted, which
``benchmarks.length_training`` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from local_backend.scheduling.lengths import MAX_QUANTILE, ObservedLengths, Prediction
from local_backend.sequences.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QUANTILES = (0.1, 0.25, 0.5, 0.75, MAX_QUANTILE)
"""The quantiles predicted; the middle one is the expected length, the last one the maximum."""

_FILE = "lengths.safetensors"
_NUM_HIDDEN = 48
_DROPOUT = 0.5  # of inputs and of hidden units, while fitting
_MAX_LOG = math.log(1e7)  # longer than any answer; prevents overflow to infinity


class Features(Protocol):
    """Computes features of prompts; others than hidden states, such as text embeddings, may be given."""

    @property
    def name(self) -> str:
        """The kind of features, saved with what is trained on them."""

    def __call__(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Features ``[prompts, features]``, float32, on the CPU."""


class HiddenStates:
    """Mean and maximum of the model's last hidden states over the prompt, and the prompt's length.

    Takes one forward without the language-model head; prompts of similar length share one. The last token's
    state alone carries less: it is about how the answer begins. Mean and maximum are about what is asked.

    An engine may decode with the model at the same time. A forward has at most ``max_forward_tokens``
    with its padding; a longer prompt runs alone.
    """

    name = "hidden_state"

    def __init__(self, model: PreTrainedModel, *, max_forward_tokens: int = 4096) -> None:
        self._model = model
        self._max_forward_tokens = max_forward_tokens

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Features ``[prompts, 2 * hidden size + 1]``; independent of which prompts share the call.

        Raises:
            ValueError: A prompt is empty.
        """
        if not all(prompts):
            raise ValueError("a prompt is empty: give at least one token")
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        found: dict[int, Tensor] = {}
        while order:
            longest = len(prompts[order[-1]])
            batch = order[-max(1, self._max_forward_tokens // longest) :]
            del order[-len(batch) :]
            found.update(zip(batch, self._forward([prompts[index] for index in batch]), strict=True))
        return torch.stack([found[index] for index in range(len(prompts))])

    def _forward(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, prompts))
        embeddings: Any = self._model.get_input_embeddings()
        device = embeddings.weight.device
        # Padded on the right, where no token of a prompt attends.
        padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        is_token = torch.arange(width, device=device) < lengths[:, None]  # [prompts, width]
        states = self._model.base_model(
            input_ids=torch.tensor(padded, device=device), attention_mask=is_token.long(), use_cache=False
        ).last_hidden_state.float()  # [prompts, width, hidden]
        mean = (states * is_token[:, :, None]).sum(1) / lengths[:, None]
        most = states.masked_fill(~is_token[:, :, None], -torch.inf).amax(1)
        return torch.cat([mean, most, lengths[:, None].float().log()], dim=1).cpu()


def ascending_tokens(raw: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    """Map unconstrained numbers to ascending quantiles in tokens: a first value and positive log-scale steps.

    ``raw`` is ``[answers, quantiles]``; logarithms of lengths have mean ``centre`` and deviation ``spread``.
    """
    steps = torch.cat([raw[:, :1], functional.softplus(raw[:, 1:])], dim=1).cumsum(1)
    return (centre + spread * steps).clamp(max=_MAX_LOG).exp()


class QuantileNetwork(nn.Module):
    """Maps ``num_features`` features of a prompt to quantiles of length in tokens."""

    feature_mean: Tensor
    feature_scale: Tensor
    centre: Tensor
    spread: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Dropout(_DROPOUT),
            nn.Linear(num_features, _NUM_HIDDEN),
            nn.SiLU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(_NUM_HIDDEN, len(QUANTILES)),
        )
        self.register_buffer("feature_mean", torch.zeros(num_features))
        self.register_buffer("feature_scale", torch.ones(num_features))
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        """Quantiles ``[answers, quantiles]`` in tokens, from ``[answers, features]``."""
        # Clipped, so that an outlier prompt does not get an absurd prediction.
        values = ((features - self.feature_mean) / self.feature_scale).clamp(-6, 6)
        return ascending_tokens(self.layers(values), self.centre, self.spread)


class TrainedLengths:
    """Predicts the mean of what several networks predict, which were fitted to features of this kind."""

    def __init__(self, features: Features, networks: Sequence[QuantileNetwork]) -> None:
        self._features = features
        self._networks = nn.ModuleList(networks).eval()

    @torch.no_grad()
    def predict(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None
    ) -> list[Prediction | None]:
        """One prediction for each prompt; see :class:`~local_backend.scheduling.lengths.LengthPredictor`."""
        if not prompts:
            return []
        features = self._features(prompts).float()
        quantiles = torch.stack([network(features) for network in self._networks]).mean(0)
        return [Prediction(row[QUANTILES.index(0.5)], row[-1]) for row in quantiles.tolist()]

    def save(self, folder: str | Path) -> None:
        """Write the networks; the features are not saved."""
        path = Path(folder).expanduser() / _FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(self._networks.state_dict(), path, metadata={"features": self._features.name})

    @classmethod
    def load(cls, folder: str | Path, features: Features) -> TrainedLengths:
        """Read what :meth:`save` wrote.

        Args:
            folder: Where :meth:`save` wrote it.
            features: Of the same kind, from the same model.

        Raises:
            FileNotFoundError: The folder holds no predictor.
            ValueError: It was trained on features of another kind, or by another version.
        """
        path = Path(folder).expanduser() / _FILE
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: give the folder of a trained predictor")
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        if about.get("features") != features.name:
            raise ValueError(
                f"{folder} was trained on {about.get('features')!r} features, got {features.name!r}: "
                "give those it was trained on"
            )
        means = [value for name, value in state.items() if name.endswith(".feature_mean")]
        predictor = cls(features, [QuantileNetwork(len(mean)) for mean in means])
        try:
            predictor._networks.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(f"{path} holds no length predictor of this version: train it again") from error
        return predictor


class LengthLog(ObservedLengths):
    """Appends one line for each answer, with ``prompt_ids`` and ``num_tokens``; thread-safe.

    As the predictor of an engine it logs every answer that was not cut, and predicts as by default.

    Args:
        path: The file; created if it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def observe(self, prompt: Sequence[int], num_tokens: int) -> None:
        """Learn the length of a complete answer to ``prompt``, and log it."""
        super().observe(prompt, num_tokens)
        self.add(prompt, num_tokens)

    def add(
        self, prompt_ids: Sequence[int], num_tokens: int, params: SamplingParams | None = None, **more: Any
    ) -> None:
        """Write one line.

        Args:
            prompt_ids: Token ids of the prompt.
            num_tokens: Tokens of the answer. Do not log cancelled answers: their full length is unknown.
            params: How it was sampled; temperature and ``max_tokens`` are logged.
            more: Further JSON values to log, e.g. the kind of request.
        """
        record: dict[str, Any] = {"prompt_ids": list(prompt_ids), "num_tokens": num_tokens, **more}
        if params is not None:
            record |= {"temperature": params.temperature, "max_tokens": params.max_tokens}
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
