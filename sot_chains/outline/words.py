"""Words and sentences in any script. Knows text alone."""

from __future__ import annotations

import re

HAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
"""The characters of scripts that separate no words, as the inside of a character class."""

SENTENCE_END = re.compile(
    r"(?<!\s\d)(?<!\s\d\d)(?<!^\d)(?<!^\d\d)[.!?]+[\"'”’)*]*(?=\s|\Z)|[。！？]+[\"'”’)*]*"
)
"""The end of a sentence. The number of an item, as in ``Then: 2. Rest``, ends none."""

_TOKEN = re.compile(rf"[{HAN}]|[^\s{HAN}]+")
_LONGEST_END = 10


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


HAN_CHARACTER = re.compile(rf"[{HAN}]")
