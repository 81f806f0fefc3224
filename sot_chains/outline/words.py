"""Words and sentences in any script. Knows text alone."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from itertools import pairwise

HAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
"""The characters of scripts that separate no words, as the inside of a character class."""

SENTENCE_END = re.compile(
    r"(?<!\s\d)(?<!\s\d\d)(?<!^\d)(?<!^\d\d)[.!?]+[\"'”’)*]*(?=\s|\Z)|[。！？]+[\"'”’)*]*"
)
"""The end of a sentence. The number of an item, as in ``Then: 2. Rest``, ends none."""

_TOKEN = re.compile(rf"[{HAN}]|[^\s{HAN}]+")
_WORD = re.compile(rf"[{HAN}]|[^\W_{HAN}]+")
_LONGEST_END = 10
_FEWEST_COMPARED = 6  # words of what is compared
_MOST_ALIKE = 0.6  # of two texts: twice their common words over all


def num_words(text: str) -> float:
    """Words of ``text``, where two characters of a script without spaces count as one."""
    if text.isascii():
        return float(len(text.split()))
    return sum(0.5 if HAN_CHARACTER.match(token) else 1.0 for token in _TOKEN.findall(text))


def ends_sentence(text: str) -> bool:
    """Whether ``text`` ends with a sentence."""
    text = text.rstrip()
    ends = SENTENCE_END.finditer(text, max(0, len(text) - _LONGEST_END))
    return any(found.end() == len(text) for found in ends)


def are_alike(one: str, other: str) -> bool:
    """Whether two texts have most of their words in common, in the same order."""
    words, others = _words(one), _words(other)
    share = SequenceMatcher(None, words, others, autojunk=False).ratio()
    return share > _MOST_ALIKE and min(len(words), len(others)) >= _FEWEST_COMPARED


def without_repetitions(text: str, said: dict[tuple[str, ...], int]) -> str:
    """``text`` without sentences that are in ``said``, or have eight words that are so twice; adds its own.

    A sentence of a few words, and what looks like one ("In the U.S."), may come again, but not at once.
    """
    kept, ends = "", [0, *(found.end() for found in SENTENCE_END.finditer(text)), len(text)]
    for begin, end in pairwise(ends):
        words = _words(text[begin:end])
        is_last = len(words) > 1 and words == next(reversed(said), ())
        is_said = words in said if len(words) >= _FEWEST_COMPARED else is_last
        runs = {words[start : start + 8] for start in range(len(words) - 7)}
        if is_said or any(said.get(run, 0) > 1 for run in runs):
            continue
        kept += text[begin:end]
        said.update({run: said.get(run, 0) + 1 for run in runs})
        if words:
            said[words] = said.pop(words, 0) + 1  # as the last one
    return kept


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.casefold()))


HAN_CHARACTER = re.compile(rf"[{HAN}]")
