"""Ends the text of a point where the model goes on to another one. A pure function of text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter

from sot_chains.outline.skeleton import Point, split_number

# Where another point may begin: at the start of a line, or before a number within one.
_CANDIDATE = re.compile(r"\n\s*|[ \t]+(?=[*(（]{0,3}(?:[0-9０-９]|\Z))")
# What may still become a marker: decoration, a number, its punctuation, and nothing behind it.
_BEGUN_MARKER = re.compile(r"[#*(（ \t]{0,8}(?:[0-9０-９]{1,3}[*]{0,2}[.)）．、]?[*]{0,2})?[ \t]*")
_MAY_BEGIN = re.compile(r"[\n0-9０-９]|\s[*(（]{0,3}\Z")
_DECORATION = "#*•-–— \t"
_SENTENCE_END = tuple(".!?:;。！？：；")


class OverrunFilter:
    """Ends the text of a point where another one begins.

    That is a line, or a sentence within one, that begins with the number of another point, in any of the
    forms that outlines have; a line that begins with its heading; and a number with the heading that it has
    in the outline. Numbered lists within the point, which begin with 1, and code blocks stay as they are.

    Args:
        point: The point being written.
        headings: The headings of all points, in order, with case folded.
    """

    cuts_sentences = False

    def __init__(self, point: Point, headings: Sequence[str]) -> None:
        self.is_over = False
        self._number = point.number
        self._headings = headings
        self._held = ""  # from where another point may begin
        self._is_begun = False
        self._num_extra = 0  # held characters that are not part of the text
        self._is_code = False
        self._has_line = False
        self._next_in_list = 0
        self._before = ""  # the last character of the text so far

    def feed(self, piece: str) -> str:
        """The text that is sure to belong to the point."""
        if not self._is_begun:
            self._is_begun = True
            first = piece[0].casefold()
            self._has_line = first.isalpha() and first not in map(itemgetter(slice(1)), self._headings)
            if not self._has_line:  # a text begins with a line, which may be that of another point
                self._held, self._num_extra = "\n", 1
        if not (self._held or _MAY_BEGIN.search(piece)):  # the usual case
            self._before = piece.rstrip()[-1:] or self._before
            return piece
        return self._read(self._held + piece, is_last=False)

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece."""
        return self._read(self._held, is_last=True).rstrip() if self._held else ""

    def _read(self, text: str, *, is_last: bool) -> str:
        end, self._held = len(text), ""
        for found in _CANDIDATE.finditer(text):
            line, line_break, _ = text[found.end() :].partition("\n")
            is_whole = bool(line_break) or is_last
            is_line = found[0][0] == "\n"
            before = text[: found.start()].rstrip()[-1:] or self._before
            begins = self._begins_other(
                line, is_line=is_line, is_whole=is_whole, starts=before in _SENTENCE_END
            )
            self._has_line |= is_line and begins is False and bool(line)
            if begins is not False:
                self.is_over, end = bool(begins), found.start()
                break
        if not self.is_over:
            self._held = text[end:]
        start, self._num_extra = self._num_extra, max(0, self._num_extra - end)
        self._before = text[start:end].rstrip()[-1:] or self._before
        return text[start:end]

    def _begins_other(self, line: str, *, is_line: bool, is_whole: bool, starts: bool) -> bool | None:
        """Whether ``line`` begins another point; ``None`` if more of it is needed to tell.

        Args:
            line: A line, or the rest of one from a number on.
            is_line: Whether it is a whole line.
            is_whole: Whether its end is known.
            starts: Whether a sentence may start there.
        """
        body = line.strip()
        if not is_whole and (body in ("`", "``") or _BEGUN_MARKER.fullmatch(line)):
            return None
        is_fence = is_line and body.startswith("```")
        self._is_code ^= is_fence
        if self._is_code or is_fence:
            return False
        number, rest = split_number(body)
        if number is None:
            return is_line and self._is_heading(body.lstrip(_DECORATION).casefold(), is_whole=is_whole)
        begun, is_own = rest.strip(_DECORATION).casefold(), number == self._number
        if 0 < number <= len(self._headings) and (not is_own or (is_line and self._has_line)):
            heading = self._headings[number - 1]
            if begun.startswith(heading):  # with its own, the point begins again
                return True
            if not is_whole and heading.startswith(begun):
                return None
        is_item = is_line or (starts and begun[:1].isalpha())
        if is_item and number in (1, self._next_in_list):
            self._next_in_list = number + 1
            return False
        return is_item and not is_own and number <= len(self._headings) + 1

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
