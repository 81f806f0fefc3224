"""Keeps a text that is cut at a number of tokens from ending in the middle of a sentence."""

from __future__ import annotations

from sot_chains.outline.words import SENTENCE_END


class WholeSentences:
    """Gives out what follows the first sentence in whole sentences or lines, and drops one that is cut."""

    is_over = cuts_sentences = False  # it never ends a text

    def __init__(self) -> None:
        self._text = ""
        self._num_given = 0
        self._end = 0  # of the last sentence or line that is whole

    def feed(self, piece: str) -> str:
        """The text that is sure to stay now."""
        self._text += piece
        for found in SENTENCE_END.finditer(self._text, self._end):
            if found.end() < len(self._text):  # else it may go on: "3." becomes "3.5"
                self._end = found.end()
        if self._end:
            self._end = max(self._end, self._text.rfind("\n"))
        return self._give(self._end or len(self._text))

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece; no sentence that is cut, or that leads to a list not written."""
        if is_cut:
            for found in SENTENCE_END.finditer(self._text, self._end):
                self._end = found.end()
        drops_rest = is_cut or self._text.rstrip().endswith((":", "："))
        return self._give(self._end if drops_rest and self._end else len(self._text))

    def _give(self, end: int) -> str:
        given, self._num_given = self._text[self._num_given : end], max(self._num_given, end)
        return given
