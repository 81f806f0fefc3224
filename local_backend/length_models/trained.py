"""The light trained predictor: prompt features, and quantiles learned from the lengths of answers.

Knows features and the network. Does not know how features are computed or networks fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from local_backend.length_models.features import Features
from local_backend.length_models.length_log import LengthExample
from local_backend.length_models.quantiles import QuantileEnsemble, fit_quantiles
from local_backend.requests.sampling import SamplingParams
from local_backend.scheduling.lengths import Prediction

_FILE = "lengths.safetensors"


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
