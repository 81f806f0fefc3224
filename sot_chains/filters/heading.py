"""Drops the heading that a model repeats before the text of a point. A pure function of text."""

from __future__ import annotations

import re

from sot_chains.outline.skeleton import Point

_NUMBER = re.compile(r"[\s*#]*[(（]?(\d{1,3})[.)）．、](?!\d)[*#\s]*")
_HEADING_END = re.compile(r"\**\s*(?:[:：]|[.。](?=[\s*])|[-–—](?=\s)|\n)\**\s*")
_AROUND_HEADING = "* \t\n:：.。-–—"
_NUM_DECIDING = 12  # characters of a number and of what follows a heading


class HeadingFilter:
    """Removes the number and the heading that a model repeats before a point's text.

    "3. Careful watering: Soil ..." repeats both, "3. Soil ..." the number; "Careful watering keeps ..."
    repeats nothing, for there the heading is part of a sentence.
    """

    is_over = cuts_sentences = False  # it never ends a text

    def __init__(self, point: Point) -> None:
        self._number = point.number
        self._heading = point.text.casefold()
        self._held = ""
        self._is_decided = False

    def feed(self, piece: str) -> str:
        """The text that can be shown now that ``piece`` has arrived."""
        self._held += piece
        if not self._is_decided:
            text: str | None = self._held.lstrip()
            if not text or not text[0].isalpha() or text[0].casefold() == self._heading[:1]:
                text = self._without_heading(is_last=False)
            if text is None:
                return ""
            self._held, self._is_decided = text, True
        shown = self._held.rstrip()  # blanks at the end wait: nothing may follow them
        self._held = self._held[len(shown) :]
        return shown

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece."""
        rest = self._held if self._is_decided else self._without_heading(is_last=True)
        return (rest or "").rstrip()

    def _without_heading(self, *, is_last: bool) -> str | None:
        """The held text without number and heading; ``None`` if more of it is needed to tell."""
        text = self._held
        if not is_last and len(text.lstrip(" *#\t\n")) < len(self._heading) + _NUM_DECIDING:
            return None
        number = _NUMBER.match(text)
        has_number = number is not None and int(number[1]) == self._number
        begin = number.end() if number and has_number else 0
        start = begin or len(text) - len(text.lstrip(" *#\t\n"))
        end = start + len(self._heading)
        if text[start:end].casefold() == self._heading:
            after = _HEADING_END.match(text, end)
            if after and after.end() < len(text):
                return text[after.end() :]
            if not text[end:].strip(_AROUND_HEADING):  # as far as it goes, the heading is all there is
                return "" if is_last else None
        return text[begin:] if has_number else text.lstrip()
