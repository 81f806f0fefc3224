"""Filters in a row, through which the text of a part passes while it is streamed, and the last of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sot_chains.outline.words import SENTENCE_END, ends_sentence, num_words, without_repetitions

_FEWEST_WORDS = 3  # of a sentence that is cut


class TextFilter(Protocol):
    """Passes a text on until it has to end."""

    is_over: bool  # the text ends here; nothing more needs to be fed
    cuts_sentences: bool  # it may end a text within a sentence

    def feed(self, piece: str) -> str:
        """The text that is sure to stay now."""

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece; ``is_cut`` if the model was stopped at a number of tokens."""


class Pipeline:
    """A text that passes through filters in turn, and ends with the first of them that ends it.

    Args:
        make_filters: Makes the filters, when the text begins.
    """

    def __init__(self, make_filters: Callable[[], Sequence[TextFilter]]) -> None:
        self._make_filters = make_filters
        self._filters: Sequence[TextFilter] = ()
        self._is_begun = False
        self.ended_by: TextFilter | None = None  # what has ended the text

    def restart(self) -> None:
        """Forgets the text, because another one follows."""
        self._is_begun, self.ended_by = False, None

    def feed(self, piece: str) -> str:
        """The text that is sure to stay now."""
        if not self._is_begun:
            self._filters, self._is_begun = self._make_filters(), True
        for one in self._filters:
            if self.ended_by is not None:
                piece, is_cut = one.feed(piece) if piece else "", self.ended_by.cuts_sentences
                rest = "" if one.is_over else one.end(is_cut=is_cut)
                piece += rest if ends_sentence(rest) or not is_cut else ""
            elif piece:
                piece = one.feed(piece)
                if one.is_over:
                    self.ended_by = one
        return piece

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece; ``is_cut`` if the model was stopped at a number of tokens."""
        text = ""
        for one in self._filters if self._is_begun else ():
            text = (one.feed(text) if text else "") + ("" if one.is_over else one.end(is_cut=is_cut))
        self._is_begun = False  # it may be told its end twice
        return text


class WholeSentences:
    """Gives out whole sentences or lines until it has ``enough_words``; drops what is cut or came before."""

    cuts_sentences = False

    def __init__(self, enough_words: int | None = None) -> None:
        self.is_over = False
        self._enough_words = enough_words
        self._text = ""
        self._num_given = 0
        self._said: dict[tuple[str, ...], int] = {}
        self._end = 0  # of the last sentence or line that is whole

    def feed(self, piece: str) -> str:
        """What is whole."""
        self._text += piece
        for found in SENTENCE_END.finditer(self._text, self._end):
            if found.end() < len(self._text):  # else it may go on: "3." becomes "3.5"
                self._end = found.end()
                if self._enough_words and num_words(self._text[: self._end]) >= self._enough_words:
                    self.is_over = True
                    return self._give(self._end)
        if self._end:
            self._end = max(self._end, self._text.rfind("\n"))
        return self._give(self._end)

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece. A single sentence that is cut stays, but for its first words."""
        if is_cut:
            for found in SENTENCE_END.finditer(self._text, self._end):
                self._end = found.end()
        drops_rest = self._text.rstrip().endswith((":", "：")) or (
            is_cut and (self._end or num_words(self._text) < _FEWEST_WORDS)
        )
        return self._give(self._end if drops_rest else len(self._text))

    def _give(self, end: int) -> str:
        given, self._num_given = self._text[self._num_given : end], max(self._num_given, end)
        return without_repetitions(given, self._said) if given else ""
