"""Mistakes of an answer that can be counted without a judge: copied outlines, overrun points, loops."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from sot_chains.calls.trace import SotTrace
from sot_chains.prompts.templates import CHINESE, ENGLISH

_NUMBER = re.compile(r"^[#*\s(（]*(\d{1,2})[*]*[.)）、．](?!\d)", re.MULTILINE)
_EXAMPLE_HEADINGS = ENGLISH.example_headings | CHINESE.example_headings
_NUM_WORDS, _NUM_REPEATS, _MOST_MORE = 8, 3, 60


def count_mistakes(text: str, trace: SotTrace) -> dict[str, int]:
    """How often each mistake was made; by Skeleton-of-Thought except for ``"looped"``.

    Args:
        text: The answer.
        trace: Its trace.
    """
    is_sot, skeleton = trace["route"] == "sot", trace["skeleton"]
    return {
        "echoed": int(is_sot and is_echoed(skeleton)),
        "overrun": sum(is_overrun(point["number"], point["text"], skeleton) for point in trace["points"]),
        "empty": sum(not point["text"].strip() for point in trace["points"]),
        "looped": int(is_looped(text)),
    }


def is_looped(text: str) -> bool:
    """Whether the same eight words occur three times."""
    words = text.casefold().split()
    counts = Counter(tuple(words[start : start + _NUM_WORDS]) for start in range(len(words) - _NUM_WORDS + 1))
    return max(counts.values(), default=0) >= _NUM_REPEATS


def is_echoed(skeleton: Sequence[str]) -> bool:
    """Whether most headings of an outline are those of the examples."""
    return 2 * sum(heading.casefold() in _EXAMPLE_HEADINGS for heading in skeleton) >= max(1, len(skeleton))


def is_overrun(number: int, text: str, skeleton: Sequence[str]) -> bool:
    """Whether the text of a point goes on to another one: by its number and heading, or its heading alone."""
    others = [
        heading.casefold() for position, heading in enumerate(skeleton, 1) if heading and position != number
    ]
    for line in text.splitlines()[1:]:
        body = re.sub(_NUMBER, "", line).strip(" *#:").casefold()
        if any(body.startswith(other) and len(body) <= len(other) + _MOST_MORE for other in others):
            return True
    return False
