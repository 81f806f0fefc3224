"""Drops the heading that a model repeats before the text of a point. A pure function of text."""

from __future__ import annotations

import re

from sot_chains.outline.skeleton import Point

_AROUND_HEADING = "* \t\n:：.。-–—"
_HEADING_END = re.compile(r"\**\s*(?:[:：]|[.。](?=[\s*])|[-–—](?=\s)|\n)\**\s*")


class HeadingFilter:
    """Removes the heading that a model repeats before a point's text, as early as is safe."""

    is_over = False  # it never ends a text

    def __init__(self, point: Point) -> None:
        self._point = point
        self._first = point.text[:1].casefold()
        self._held = ""
        self._deciding = True

    def feed(self, piece: str) -> str:
        """The text that can be shown now that ``piece`` has arrived."""
        self._held += piece
        if self._deciding:
            first = self._held[:1]
            if first.isalpha() and first.casefold() != self._first:  # the usual case
                self._deciding = False
            elif not self._decide(ended=False):
                return ""
        shown = self._held.rstrip()  # blanks at the end wait: nothing may follow them
        self._held = self._held[len(shown) :]
        return shown

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece."""
        if self._deciding:
            self._decide(ended=True)
        return self._held.rstrip()

    def _decide(self, *, ended: bool) -> bool:
        length = echo_length(self._held, self._point, ended=ended)
        if length is None:
            return False
        self._held = self._held[length:]
        self._deciding = False
        return True


def echo_length(text: str, point: Point, *, ended: bool) -> int | None:
    """How many characters at the start of ``text`` repeat the number or heading of ``point``.

    Blank space before and after them counts too. ``None`` means that more text is needed to tell, which
    it never means if the text has ``ended``.

    "3. Careful watering: Soil ..." repeats both, "3. Soil ..." the number; "Careful watering keeps ..."
    repeats nothing, for there the heading is part of a sentence.
    """
    blank = len(text) - len(text.lstrip())
    start = _skip(text, blank, "*# \t\n")
    number_end = _number_end(text, start, point.number)
    if number_end is None and not ended:
        return None
    has_number = bool(number_end)
    heading_start = _skip(text, number_end or start, "*# \t\n")
    without_heading = _skip(text, number_end, " \t\n") if number_end else blank

    label = point.text.casefold()
    begun = text[heading_start : heading_start + len(point.text)].casefold()
    if len(text) - heading_start < len(point.text):
        undecided = label.startswith(begun) and not ended
        return None if undecided else without_heading
    if begun != label:
        return without_heading
    label_end = heading_start + len(point.text)
    heading_end = _HEADING_END.match(text, label_end)
    if heading_end and heading_end.end() < len(text):
        return heading_end.end()
    if ended:  # with nothing after it, the heading is all the model wrote
        return without_heading if text[label_end:].strip(_AROUND_HEADING) else len(text)
    if not text[label_end:].strip(_AROUND_HEADING):
        return None
    return without_heading if has_number else blank


def _number_end(text: str, start: int, number: int) -> int | None:
    """Where "3." or "(3)" at ``start`` ends; ``0`` if there is none, ``None`` if there may yet be one."""
    if start < len(text) and text[start] not in "(（0123456789":
        return 0
    for marker in (f"{number}.", f"{number})", f"({number})", f"{number}、", f"{number}．", f"（{number}）"):
        if text.startswith(marker, start):
            end = start + len(marker)
            if end == len(text):
                return None
            if not text[end].isdigit():
                return end
        elif marker.startswith(text[start:]):
            return None
    return 0


def _skip(text: str, start: int, characters: str) -> int:
    while start < len(text) and text[start] in characters:
        start += 1
    return start
