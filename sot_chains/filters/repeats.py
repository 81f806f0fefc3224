"""Sentences that an answer has said before, which points written at once cannot know of each other.

A pure function of the text in reading order, so that a stream and the whole answer leave out the same.
"""

from __future__ import annotations

import re
from collections import Counter

# Behind " 2." an item of a list on one line begins.
_SENTENCE_END = re.compile(r"(?<!\s[0-9])[.!?]+[\"'”’)*]*(?=\s)|\n")
_NUM_WORDS = 8


class RepeatedSentences:
    """Leaves out sentences with eight words in a row that the answer has ``most_times`` already.

    A point whose sentences are all repeated keeps the first one. What follows a code fence in a point is left
    as it is.
    """

    def __init__(self, most_times: int = 2) -> None:
        self._most_times = most_times
        self._times: Counter[tuple[str, ...]] = Counter()
        self._before: list[str] = []  # the last words of the point
        self._held = ""  # a sentence that has not ended
        self._left_out = ""  # the first one of this point
        self._has_text = False
        self._is_code = False

    def note(self, text: str) -> None:
        """Notes what has been said before the points."""
        self._times.update(_spans(text.casefold().split()))

    def feed(self, text: str) -> str:
        """The whole sentences, now that ``text`` has been added to the point, that are to be shown."""
        self._held += text
        given, start = "", 0
        for end in _SENTENCE_END.finditer(self._held):
            given += self._shown(self._held[start : end.end()])
            start = end.end()
        self._held = self._held[start:]
        return given

    def end(self) -> str:
        """The rest of the point. The next text is that of another one."""
        given = self._shown(self._held)
        if not self._has_text:
            given = self._left_out
        self._held = self._left_out = ""
        self._before = []  # a heading stands between
        self._has_text = self._is_code = False
        return given

    def _shown(self, sentence: str) -> str:
        """The sentence, or nothing if it is a repetition."""
        self._is_code |= "```" in sentence
        words = [*self._before, *sentence.casefold().split()]
        spans = _spans(words)
        if not self._is_code and any(self._times[span] >= self._most_times for span in spans):
            self._left_out = self._left_out or sentence.strip()
            return ""
        self._times.update(spans)
        self._before = words[-_NUM_WORDS + 1 :]
        shown = sentence if self._has_text else sentence.lstrip()
        self._has_text |= bool(shown)
        return shown


def _spans(words: list[str]) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + _NUM_WORDS]) for start in range(len(words) - _NUM_WORDS + 1)]
