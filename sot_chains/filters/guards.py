"""Ends a text where its model went wrong: at another point, or past the length asked for.

Guards take the pieces of a text as it is streamed and give back those that are sure to stay. Pure functions
of text. Do not know models or calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from sot_chains.outline.skeleton import Point, marker_of
from sot_chains.outline.words import HAN as _HAN
from sot_chains.outline.words import num_words


class Guard(Protocol):
    """Passes a text on until it has to end.

    Attributes:
        is_over: Whether the text ends here; nothing more needs to be fed.
    """

    is_over: bool

    def feed(self, piece: str) -> str:
        """The text that is sure to stay now."""
        ...

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece; ``is_cut`` if the model was stopped at a number of tokens."""
        ...


class Guarded:
    """A text that passes through several guards in turn, and ends with the first of them that ends it.

    Args:
        guards: By name, in order.
    """

    def __init__(self, guards: Mapping[str, Guard]) -> None:
        self._guards = guards
        self.stopped_by: str | None = None

    def feed(self, piece: str) -> str:
        """The text that is sure to stay now."""
        for name, guard in self._guards.items():
            if self.stopped_by is not None:
                piece = guard.feed(piece) if piece else ""
                piece += "" if guard.is_over else guard.end()
            elif piece:
                piece = guard.feed(piece)
            if guard.is_over and self.stopped_by is None:
                self.stopped_by = name
        return piece

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece; ``is_cut`` if the model was stopped at a number of tokens."""
        text = ""
        for guard in self._guards.values():
            text = (guard.feed(text) if text else "") + ("" if guard.is_over else guard.end(is_cut=is_cut))
        return text


# --- other points

# What may still become a marker: decoration, a number, its punctuation, and nothing behind it.
_BEGUN_MARKER = re.compile(r"[#*(（ \t]{0,8}(?:[0-9０-９]{1,3}[*]{0,2}[.)）．、]?[*]{0,2})?[ \t]*")
_DECORATION = "#*•-–— \t"


class OverrunGuard:
    """Ends the text of a point where the model goes on to another one.

    That is a line which begins with the number of another point, in any of the forms that outlines have, or
    with its heading alone. Numbered lists within the point, and code blocks, are left as they are.

    Args:
        point: The point being written.
        headings: The headings of all points, in order, with case folded.
    """

    def __init__(self, point: Point, headings: Sequence[str]) -> None:
        self.is_over = False
        self._number = point.number
        self._headings = headings
        self._held = ""  # of a line that is not decided yet, with the line breaks before it
        self._is_decided = False
        self._is_code = False
        self._next_in_list = 0
        self._has_line = False

    def feed(self, piece: str) -> str:
        """The text that is sure to belong to the point."""
        self._held += piece
        return self._read(is_last=False)

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece."""
        return self._read(is_last=True).rstrip()

    def _read(self, *, is_last: bool) -> str:
        given: list[str] = []
        while self._held and not self.is_over:
            body = self._held.lstrip("\n")
            breaks = len(self._held) - len(body)
            if breaks:
                self._is_decided = False
            line, line_break, _ = body.partition("\n")
            if not self._is_decided:
                begins = self._begins_other(line, is_whole=bool(line_break) or is_last)
                if begins is None:
                    break
                if begins:
                    self.is_over, self._held = True, ""
                    break
                self._is_decided = self._has_line = True
            given.append(self._held[: breaks + len(line)])
            self._held = body[len(line) :]
            if not line_break or not self._held.strip("\n"):
                break  # line breaks wait for what follows
        return "".join(given)

    def _begins_other(self, line: str, *, is_whole: bool) -> bool | None:
        """Whether ``line`` begins another point; ``None`` if more of it is needed to tell."""
        body = line.strip()
        if not is_whole and "```".startswith(body[:3]) and len(body) < 3:
            return None
        if body.startswith("```"):
            self._is_code = not self._is_code
            return False
        if self._is_code:
            return False
        if not is_whole and _BEGUN_MARKER.fullmatch(line):
            return None
        number, rest = marker_of(body)
        if number is not None:
            return self._is_numbered_like_other(number, rest.strip(_DECORATION), is_whole=is_whole)
        return self._is_heading(body.lstrip(_DECORATION).casefold(), is_whole=is_whole)

    def _is_numbered_like_other(self, number: int, rest: str, *, is_whole: bool) -> bool | None:
        if number in (1, self._next_in_list) or number == self._number:
            heading = self._headings[number - 1] if number <= len(self._headings) else ""
            if heading and (number != self._number or self._has_line):  # with its own, it begins again
                begun = rest.casefold()
                if begun.startswith(heading):
                    return True
                if not is_whole and heading.startswith(begun):
                    return None
            if number in (1, self._next_in_list):
                self._next_in_list = number + 1
            return False
        return number <= len(self._headings) + 1

    def _is_heading(self, body: str, *, is_whole: bool) -> bool | None:
        for number, heading in enumerate(self._headings, 1):
            if number == self._number:
                continue
            if body.startswith(heading):
                rest = body[len(heading) :].lstrip("* \t")
                if rest[:1] in (":", "：") or (is_whole and not rest.rstrip(".")):
                    return True
                if not is_whole and not rest:
                    return None
            elif not is_whole and heading.startswith(body):
                return None
        return False


# --- length

_TOKEN = re.compile(rf"\s*(?:[{_HAN}]|[^\s{_HAN}]+)")
_SENTENCE_END = re.compile(r"[.!?。！？]+[\"'”’)*]*(?=\s|$)|[。！？]")
_NUMBER = re.compile(r"\s*[0-9]{1,2}\.")  # most likely of an item of a list: it ends no sentence


class SentenceBound:
    """Ends a text with the sentence in which it becomes longer than asked for.

    Args:
        max_words: Words from which on the next end of a sentence is the end of the text. In scripts without
            spaces, two characters count as a word.
        gives_sentences: Whether what follows the first sentence is given out in whole sentences or lines, so
            that a text that is cut at a number of tokens ends with one, too.
    """

    def __init__(self, max_words: int, *, gives_sentences: bool = False) -> None:
        self.is_over = False
        self._num_left = float(max_words)
        self._gives_sentences = gives_sentences
        self._rest = ""
        self._num_counted = 0  # characters of the rest whose words have been counted
        self._is_code = False
        self._has_sentence = False

    def feed(self, piece: str) -> str:
        """The text that is sure to stay."""
        return self._read(self._rest + piece, is_last=False)

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece; not a sentence that is cut, or that leads to a list not written."""
        given = self._read(self._rest, is_last=True)
        if self.is_over or (self._has_sentence and (is_cut or self._rest.rstrip().endswith((":", "：")))):
            return given
        return given + self._rest

    def _read(self, text: str, *, is_last: bool) -> str:
        place, shown = self._num_counted, 0
        while not self.is_over and (token := _TOKEN.match(text, place)):
            if token.end() == len(text) and not is_last:
                break
            if self._holds and "\n" in token[0]:
                shown = place
            place = token.end()
            self._is_code ^= "```" in token[0]
            self._num_left -= num_words(token[0])
            ends = bool(_SENTENCE_END.search(token[0]) and not (self._is_code or _NUMBER.fullmatch(token[0])))
            self.is_over = ends and self._num_left <= 0
            self._has_sentence |= ends
            if ends or not self._holds:
                shown = place
        self._rest, self._num_counted = text[shown:], place - shown
        return text[:shown]

    @property
    def _holds(self) -> bool:
        return self._gives_sentences and self._has_sentence
