"""The light trained predictor: prompt features, and quantiles learned from the lengths of answers.

Knows a ``transformers`` model's hidden states. Does not know how networks are fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from local_backend.lengths.length_log import LengthExample
from local_backend.lengths.quantiles import QuantileEnsemble, fit_quantiles
from local_backend.scheduling.lengths import Prediction
from local_backend.sequences.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILE = "lengths.safetensors"


class Features(Protocol):
    """Computes features of prompts; others than hidden states, such as text embeddings, may be given."""

    @property
    def name(self) -> str:
        """The kind of features, saved with what is trained on them."""
        ...

    def __call__(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Features ``[prompts, features]``, float32, on the CPU."""
        ...


class HiddenStates:
    """Mean and maximum of the model's last hidden states over the prompt, and the prompt's length.

    Takes one forward without the language-model head; prompts of similar length share one. The last token's
    state alone carries less: it is about how the answer begins. Mean and maximum are about what is asked.

    Args:
        model: A decoder-only ``transformers`` model; an engine may decode with it at the same time.
        max_forward_tokens: Maximum tokens of a forward, padding included; a longer prompt runs alone.
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
        if not prompts:
            return torch.zeros(0, 0)
        if not all(prompts):
            raise ValueError("a prompt is empty: give at least one token")
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        found: dict[int, Tensor] = {}
        while order:
            longest = len(prompts[order[-1]])
            batch = order[-max(1, self._max_forward_tokens // longest) :]
            del order[-len(batch) :]
            found.update(zip(batch, self._forward([prompts[number] for number in batch]), strict=True))
        return torch.stack([found[number] for number in range(len(prompts))])

    def _forward(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, prompts))
        embeddings: Any = self._model.get_input_embeddings()
        device = embeddings.weight.device
        # Padded on the right, where no token of a prompt attends.
        token_ids = torch.tensor(
            [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device
        )
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        is_token = torch.arange(width, device=device) < lengths[:, None]  # [prompts, width]
        states = self._model.base_model(
            input_ids=token_ids, attention_mask=is_token.long(), use_cache=False
        ).last_hidden_state.float()  # [prompts, width, hidden]
        mean = (states * is_token[:, :, None]).sum(1) / lengths[:, None]
        most = states.masked_fill(~is_token[:, :, None], -torch.inf).amax(1)
        return torch.cat([mean, most, lengths[:, None].float().log()], dim=1).cpu()


class TrainedLengths:
    """Predicts lengths from features; make one with :meth:`fit` or :meth:`load`.

    Args:
        features: Computes prompt features, of the kind the networks were trained on.
        networks: The fitted networks.
    """

    def __init__(self, features: Features, networks: QuantileEnsemble) -> None:
        self._features = features
        self._networks = networks

    @classmethod
    def fit(cls, features: Features, examples: Sequence[LengthExample], *, seed: int = 0) -> TrainedLengths:
        """Learn from prompts and the lengths of their answers; the same seed gives the same predictor.

        Raises:
            ValueError: There are too few of them.
        """
        described = features([example.prompt_ids for example in examples])
        lengths = [example.num_tokens for example in examples]
        return cls(features, fit_quantiles(described, lengths, seed=seed))

    def predict(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None
    ) -> list[Prediction | None]:
        """One prediction for each prompt; see :class:`~local_backend.scheduling.lengths.LengthPredictor`."""
        return self._networks.predictions(self._features(prompts)) if prompts else []

    def save(self, folder: str | Path) -> None:
        """Write the networks; the features are not saved."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._networks.save(Path(folder) / _FILE, features=self._features.name)

    @classmethod
    def load(cls, folder: str | Path, features: Features) -> TrainedLengths:
        """Read what :meth:`save` wrote.

        Args:
            folder: Where :meth:`save` wrote it.
            features: Of the same kind, from the same model.

        Raises:
            FileNotFoundError: The folder holds no predictor.
            ValueError: It was trained on features of another kind.
        """
        networks, about = QuantileEnsemble.load(Path(folder) / _FILE)
        if about.get("features") != features.name:
            raise ValueError(
                f"{folder} was trained on {about.get('features')!r} features, got {features.name!r}: "
                "give those it was trained on"
            )
        return cls(features, networks)
