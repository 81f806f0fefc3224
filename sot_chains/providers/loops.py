"""Ends a reply in which the model repeats itself. A pure function of the text of a completion."""

from __future__ import annotations

import re
from collections import Counter

from sot_chains.outline.words import HAN, ends_sentence

_TOKEN = re.compile(rf"\s*(?:[{HAN}]|[^\s{HAN}]+)")
_NOT_COMPARED = " \t\r\n.,;:!?\"'*()"
_NUM_WORDS, _NUM_REPEATS = 8, 3


class LoopGuard:
    """Ends a text that repeats the same eight words a third time, before the repetition it is in.

    While words repeat earlier ones they are held back, and given out once the text goes on otherwise. From
    the second time on whole sentences or lines are given out only, so that the text ends with one. In
    scripts other than Latin, sixteen words or characters count.
    """

    cuts_sentences = True

    def __init__(self) -> None:
        self.is_over = False
        self._counts = Counter[tuple[str, ...]]()  # how often each run of words has come
        self._words: list[str] = []
        self._num_repeating = 0  # of the last words: those that repeat earlier ones
        self._held: list[str] = []
        self._num_free: int | None = None  # of the held words: those before the first repetition
        self._rest = ""  # a word that may not be whole

    def feed(self, piece: str) -> str:
        """The text that is sure to stay."""
        return self._read(self._rest + piece, is_last=False)

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece."""
        given = self._read(self._rest, is_last=True)
        return given if self.is_over else given + "".join(self._held) + self._rest

    def _read(self, text: str, *, is_last: bool) -> str:
        if self.is_over:
            return ""
        tokens = _TOKEN.findall(text)
        num_read = sum(map(len, tokens))
        if tokens and num_read == len(text) and not is_last and text[-1:].isascii():
            num_read -= len(tokens.pop())  # the last word may go on
        self._rest = text[num_read:]
        for token in tokens:
            self._words.append(token.strip(_NOT_COMPARED).casefold() or token)
            self._held.append(token)
            num_repeats = self._count()
            if num_repeats and self._num_free is None:
                self._num_free = len(self._held) - self._num_repeating
            if num_repeats >= _NUM_REPEATS - 1:
                self.is_over, self._rest = True, ""
                break
        return self._given()

    def _count(self) -> int:
        words = self._words
        word, pair = (words[-1],), tuple(words[-2:])
        if len(pair) == 2 and self._counts[pair]:
            self._num_repeating = max(self._num_repeating, 1) + 1
        else:
            self._num_repeating = int(self._counts[word] > 0)
        num_compared = _NUM_WORDS * (1 if words[-1].isascii() else 2)
        run = tuple(words[-num_compared:]) if len(words) >= num_compared else ()
        num_repeats = self._counts[run] if run else 0
        self._counts.update({word, pair, run} - {()})
        return num_repeats

    def _given(self) -> str:
        held = self._held
        end = len(held) - self._num_repeating
        while self._num_free is not None and end > self._num_free and not self._ends_at(end):
            end -= 1
        given, self._held = held[:end], [] if self.is_over else held[end:]
        if self._num_free is not None:
            self._num_free = max(0, self._num_free - end)
        return "".join(given)

    def _ends_at(self, index: int) -> bool:
        is_line = index < len(self._held) and "\n" in self._held[index]
        return is_line or ends_sentence(self._held[index - 1])
