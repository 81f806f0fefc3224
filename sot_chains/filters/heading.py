"""Drops the heading and the question that a model repeats before a point. A pure function of text."""

from __future__ import annotations

import re

from sot_chains.outline.skeleton import Point

_NUMBER = re.compile(r"[\s*#]*[(（]?(\d{1,3})[.)）．、](?!\d)[*#\s]*")
_HEADING_END = re.compile(r"\**\s*(?:[:：]|[.。](?=[\s*])|[-–—](?=\s)|\n)\**\s*")
_QUESTION_MARKS = " ?!.:？！。："
_QUESTION_END = re.compile(rf"[{_QUESTION_MARKS}]*[?!.:？！。：\n][\"”*]*(?:\s+|\Z)")
_BEFORE_HEADING, _AROUND_HEADING = "* #\t\n", "* \t\n:：.。-–—?!？！"
_NUM_DECIDING = 12  # characters of a number and of what follows a heading


class HeadingFilter:
    """Removes what a model repeats before a point's text: its number, its heading, the question.

    "3. Careful watering: Soil ..." repeats number and heading, "3. Soil ..." the number; "Careful watering
    keeps ..." repeats nothing, for there the heading is part of a sentence.
    """

    is_over = cuts_sentences = False  # it never ends a text

    def __init__(self, point: Point, question: str = "") -> None:
        self._number = point.number
        self._heading = point.text.casefold()
        self._question = question.casefold().rstrip(_QUESTION_MARKS)
        self._starts = {self._heading[:1], self._question[:1]}
        self._held = ""
        self._is_decided = False

    def feed(self, piece: str) -> str:
        """The text that can be shown now that ``piece`` has arrived."""
        return self._read(piece, is_last=False)

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece."""
        return self._read("", is_last=True)

    def _read(self, piece: str, *, is_last: bool) -> str:
        self._held += piece
        while self._held and not self._is_decided:
            rest: str | None = self._held.lstrip()
            if not rest or not rest[0].isalpha() or rest[0].casefold() in self._starts:
                rest = self._without_heading(is_last=is_last)
            if rest is None:
                return ""
            self._is_decided, self._held = len(rest) == len(self._held.lstrip()), rest
        shown = self._held.rstrip()  # blanks at the end wait: nothing may follow them
        self._held = self._held[len(shown) :]
        return shown

    def _without_heading(self, *, is_last: bool) -> str | None:
        """The held text without one repetition; ``None`` if more of it is needed to tell."""
        text = self._held
        start = len(text) - len(text.lstrip(_BEFORE_HEADING))
        begun = text[start:].casefold()
        if not is_last and (
            len(begun) < len(self._heading) + _NUM_DECIDING or self._question.startswith(begun)
        ):
            return None
        number = _NUMBER.match(text)
        has_number = number is not None and int(number[1]) == self._number
        begin = number.end() if number and has_number else 0
        start = begin or start
        for given, end_of in ((self._heading, _HEADING_END), (self._question, _QUESTION_END)):
            end = start + len(given)
            if given and text[start:end].casefold() == given:
                if (after := end_of.match(text, end)) and after.end() < len(text):
                    return text[after.end() :]
                if not text[end:].strip(_AROUND_HEADING):  # as far as it goes, it is all there is
                    return "" if is_last else None
        return text[begin:] if has_number else text.lstrip()
