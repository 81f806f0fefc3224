"""Text cut into pieces: words, white space, and whatever else, so that the pieces joined are the text.

Citations are made of these, and not of a model's tokens, so that they depend on the texts alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

import regex

# Scripts without spaces between words: each character counts as one.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_LETTER = rf"[[\p{{L}}\p{{N}}_]--[{_UNSPACED}]]"
_PIECE = regex.compile(
    rf"[{_UNSPACED}]\p{{M}}*"  # marks stay with what they modify, here and below
    rf"|(?:{_LETTER}\p{{M}}*)+(?:['’](?:{_LETTER}\p{{M}}*)+)*"
    r"|\s+"
    r"|\X",
    regex.V1,
)
# The same for plain ASCII, several times as fast.
_ASCII_PIECE = re.compile(r"\w+(?:'\w+)*|\s+|[^\w\s]", re.ASCII)


def pieces(text: str) -> list[str]:
    """``text`` cut into words, runs of white space, and single other characters.

    A character is never separated from its combining marks, nor an emoji from what joins it.
    """
    if text.isascii():
        return _ASCII_PIECE.findall(text)
    found: list[str] = _PIECE.findall(text)
    return found


def offsets(parts: Sequence[str]) -> list[int]:
    """Where each of ``parts`` begins in their text, in characters, and at last where the text ends."""
    return list(accumulate(map(len, parts), initial=0))


def is_word(piece: str) -> bool:
    """Whether one of :func:`pieces` is a word, rather than white space or a sign."""
    return piece[0].isalnum() or piece[0] == "_"


def num_words(text: str) -> int:
    """How many words ``text`` has."""
    return sum(map(is_word, pieces(text)))
