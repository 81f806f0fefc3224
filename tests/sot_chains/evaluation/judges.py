"""Judges whose leaning is known. What they say depends on what they are asked alone."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

from langchain_core.messages import BaseMessage


def answers_in(messages: Sequence[BaseMessage]) -> tuple[str, str]:
    """The first and the second answer a judge is shown."""
    text = str(messages[-1].text)
    first, second = (re.search(rf"<answer_{n}>\n(.*?)\n</answer_{n}>", text, re.DOTALL) for n in (1, 2))
    assert first, text
    assert second, text
    return first[1], second[1]


def always_first(messages: Sequence[BaseMessage]) -> str:
    answers_in(messages)
    return "I like what comes first.\nVERDICT: 1"


def prefers_longer(messages: Sequence[BaseMessage]) -> str:
    first, second = map(len, answers_in(messages))
    return "VERDICT: " + ("TIE" if first == second else "1" if first > second else "2")


def leans_to_the_first(messages: Sequence[BaseMessage]) -> str:
    """Prefers the longer answer, except that it gives one pair in four to the first answer."""
    pair = "".join(sorted(answers_in(messages)))
    return always_first(messages) if zlib.crc32(pair.encode()) % 4 == 0 else prefers_longer(messages)
