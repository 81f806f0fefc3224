"""Words and sentences in any script. Knows text alone."""

from __future__ import annotations

import re

HAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
"""The characters of scripts that separate no words, as the inside of a character class."""

_TOKEN = re.compile(rf"[{HAN}]|[^\s{HAN}]+")


def num_words(text: str) -> float:
    """Words of ``text``, where two characters of a script without spaces count as one."""
    if text.isascii():
        return float(len(text.split()))
    return sum(0.5 if HAN_CHARACTER.match(token) else 1.0 for token in _TOKEN.findall(text))


SENTENCE_END = re.compile(r"[.!?。！？]+[\"'”’)*]*(?=\s|$)|[。！？]")
"""The end of a sentence, with quotes, brackets and emphasis that close behind it."""

HAN_CHARACTER = re.compile(rf"[{HAN}]")
