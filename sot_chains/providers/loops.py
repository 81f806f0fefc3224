"""Ends a reply in which the model repeats itself. A pure function of text, for whoever reads completions."""

from __future__ import annotations

import re
from collections import Counter

from sot_chains.outline.words import HAN, SENTENCE_END

_TOKEN = re.compile(rf"\s*(?:[{HAN}]|[^\s{HAN}]+)")
_NUMBER = re.compile(r"\s*[0-9]{1,2}\.")  # most likely of an item of a list: it ends no sentence
_NOT_COMPARED = " \t\r\n.,;:!?\"'*()"
_NUM_WORDS, _NUM_REPEATS = 8, 3


class LoopGuard:
    """Ends a text that repeats the same eight words a third time, before the repetition it is in.

    While words repeat earlier ones they are held back, and given out once the text goes on otherwise. From
    the second time on whole sentences or lines are given out only, so that the text ends with one. In
    scripts other than Latin, sixteen words or characters count.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._words: list[str] = []
        self._places: dict[str, list[int]] = {}
        self._runs: dict[int, int] = {}  # by the place that would go on with it: length of the repetition
        self._held: list[str] = []
        self._rest = ""  # a word that may not be whole
        self._num_repeats: Counter[tuple[str, ...]] = Counter()

    def feed(self, piece: str) -> str:
        """The text that is sure to stay."""
        return self._read(self._rest + piece, is_last=False)

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece."""
        given = self._read(self._rest, is_last=True)
        return "" if self.is_over else given + "".join(self._held) + self._rest

    def _read(self, text: str, *, is_last: bool) -> str:
        tokens = _TOKEN.findall(text)
        num_read = sum(map(len, tokens))
        if tokens and num_read == len(text) and not is_last and text[-1:].isascii():
            num_read -= len(tokens.pop())  # the last word may go on
        self._rest = text[num_read:]
        given: list[str] = []
        for token in tokens:
            word = token.strip(_NOT_COMPARED).casefold() or token
            if word not in self._places and not self._held and not self._num_repeats:  # the usual case
                self._places[word] = [len(self._words)]
                self._words.append(word)
                given.append(token)
            elif self._add(word, token, given):
                self.is_over, self._rest = True, ""
                break
        return "".join(given)

    def _add(self, word: str, token: str, given: list[str]) -> bool:
        """Takes the next word, and gives out those that are sure to stay; whether the text is a loop."""
        words, here = self._words, len(self._words)
        places = self._places.setdefault(word, [])
        runs = {place + 1: length + 1 for place, length in self._runs.items() if words[place] == word}
        for place in places:
            runs.setdefault(place + 1, 1)
        places.append(here)
        words.append(word)
        self._held.append(token)
        self._runs = runs
        longest = max(runs.values(), default=0)
        num_compared = _NUM_WORDS * (1 if word.isascii() else 2)
        if longest >= num_compared:  # else these words have not been there before
            repeated = tuple(words[-num_compared:])
            self._num_repeats[repeated] += 1
            if self._num_repeats[repeated] >= _NUM_REPEATS - 1:
                return True
        cut = max(0, len(self._held) - longest)
        while self._num_repeats and cut and not self._ends_at(cut):
            cut -= 1
        given += self._held[:cut]
        del self._held[:cut]
        return False

    def _ends_at(self, place: int) -> bool:
        """Whether the held word before ``place`` ends a sentence or a line."""
        is_line = place < len(self._held) and "\n" in self._held[place]
        word = self._held[place - 1]
        return is_line or bool(SENTENCE_END.search(word) and not _NUMBER.fullmatch(word))
