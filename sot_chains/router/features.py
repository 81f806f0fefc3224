"""What the trained router reads off a question: its words, hashed, and its form. Pure."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

NUM_BUCKETS = 2**16
NUM_SHAPES = 20

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
    counts = Counter(zlib.crc32(gram.encode()) % NUM_BUCKETS for gram in _grams(question[:_MAX_CHARACTERS]))
    indices = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
    values = 1 + np.log(np.fromiter(counts.values(), dtype=np.float32, count=len(counts)))
    return indices, values / np.linalg.norm(values) if len(values) else values


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
