"""Ends a reply in which the model repeats itself. A pure function of the text of a completion."""

from __future__ import annotations

import re
from collections import defaultdict

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
        self._words: list[str] = []
        self._positions: defaultdict[str, list[int]] = defaultdict(list)
        self._runs: dict[int, int] = {}  # by the position that would continue it: length of the repetition
        self._held: list[str] = []
        self._num_free = 0  # of the held words: those before the first repetition, which need end no sentence
        self._rest = ""  # a word that may not be whole
        self._num_repeats: dict[tuple[str, ...], int] = {}

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
        words, positions, runs, held = self._words, self._positions, self._runs, self._held
        for token in tokens:
            word = token.strip(_NOT_COMPARED).casefold() or token
            if runs:
                runs = {end + 1: length + 1 for end, length in runs.items() if words[end] == word}
            for position in positions[word]:
                runs.setdefault(position + 1, 1)
            positions[word].append(len(words))
            words.append(word)
            held.append(token)
            if runs and len(words) >= 2 * _NUM_WORDS and self._repeats(max(runs.values())):
                self.is_over, self._rest = True, ""
                break
        self._runs = runs
        return self._given(max(runs.values(), default=0))

    def _repeats(self, longest: int) -> bool:
        """Whether the last words, which are the end of a repetition, stand there for the third time."""
        num_compared = _NUM_WORDS * (1 if self._words[-1].isascii() else 2)
        if longest < num_compared:
            return False
        if not self._num_repeats:
            self._num_free = len(self._held) - longest
        repeated = tuple(self._words[-num_compared:])
        self._num_repeats[repeated] = num_repeats = self._num_repeats.get(repeated, 0) + 1
        return num_repeats >= _NUM_REPEATS - 1

    def _given(self, num_repeating: int) -> str:
        """Gives out the held words that are sure to stay."""
        held = self._held
        end = len(held) - num_repeating
        while self._num_repeats and end > self._num_free and not self._ends_at(end):
            end -= 1
        given, self._held = held[:end], [] if self.is_over else held[end:]
        self._num_free = max(0, self._num_free - end)
        return "".join(given)

    def _ends_at(self, index: int) -> bool:
        """Whether the held word before ``index`` ends a sentence or a line."""
        is_line = index < len(self._held) and "\n" in self._held[index]
        return is_line or ends_sentence(self._held[index - 1])
