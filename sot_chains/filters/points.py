"""Where the text of a point begins and ends, and filters in a row, through which it passes while streamed.

Pure functions of text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Protocol

from sot_chains.outline.skeleton import Point, split_number
from sot_chains.outline.words import SENTENCE_END, ends_sentence, num_words, without_repetitions

_NUMBER = re.compile(r"[\s*#]*[(（]?(\d{1,3})[.)）．、](?!\d)[*#\s]*")
_HEADING_END = re.compile(r"\**\s*(?:[:：]|[.。](?=[\s*])|[-–—](?=\s)|\n)\**\s*")
_QUESTION_MARKS = " ?!.:？！。："
_QUESTION_END = re.compile(rf"[{_QUESTION_MARKS}]*[?!.:？！。：\n][\"”*]*(?:\s+|\Z)")
_BEFORE_HEADING, _AROUND_HEADING = "* #\t\n", "* \t\n:：.。-–—?!？！"
_NUM_DECIDING = 12  # characters of a number and of what follows a heading


class TextFilter(Protocol):
    """Passes a text on until it has to end."""

    is_over: bool = False  # the text ends here; nothing more needs to be fed
    cuts_sentences: bool = False  # it may end a text within a sentence

    def feed(self, piece: str) -> str:
        """The text that is sure to stay now."""

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece; ``is_cut`` if the model was stopped at a number of tokens."""


class HeadingFilter(TextFilter):
    """Removes what a model repeats before a point's text: its number, its heading, the question.

    "3. Careful watering: Soil ..." repeats number and heading, "3. Soil ..." the number; "Careful watering
    keeps ..." repeats nothing, for there the heading is part of a sentence.
    """

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
        is_short = len(begun) < len(self._heading) + _NUM_DECIDING
        if not is_last and (is_short or self._question.startswith(begun)):
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


# Where another point may begin: at the start of a line, or before a number within one.
_CANDIDATE = re.compile(r"\n\s*|[ \t]+(?=[*(（]{0,3}(?:[0-9０-９]|\Z))")
# What may still become a marker: decoration, a number, its punctuation, and nothing behind it.
_BEGUN_MARKER = re.compile(r"[#*(（ \t]{0,8}(?:[0-9０-９]{1,3}[*]{0,2}[.)）．、]?[*]{0,2})?[ \t]*")
_MAY_BEGIN = re.compile(r"[\n0-9０-９]|\s[*(（]{0,3}\Z")
_DECORATION = "#*•-–— \t"
_SENTENCE_END = tuple(".!?:;。！？：；")


class OverrunFilter(TextFilter):
    """Ends the text of a point where another one begins.

    That is a line, or a sentence within one, that begins with the number of another point, in any of the
    forms that outlines have; a line that begins with its heading; and a number with the heading that it has
    in the outline. Numbered lists within the point, which begin with 1, and code blocks stay as they are.

    Args:
        point: The point being written.
        headings: The headings of all points, in order, with case folded.
    """

    def __init__(self, point: Point, headings: Sequence[str]) -> None:
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
            starts = before in _SENTENCE_END
            begins = self._begins_other(line, is_line=is_line, is_whole=is_whole, starts=starts)
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


_FEWEST_WORDS = 3  # of a sentence that is cut


class Pipeline:
    """A text that passes through filters in turn, and ends with the first of them that ends it.

    Args:
        make_filters: Makes the filters, when the text begins.
    """

    def __init__(self, make_filters: Callable[[], Sequence[TextFilter]]) -> None:
        self._make_filters = make_filters
        self._filters: Sequence[TextFilter] | None = None  # once the text has begun
        self.ended_by: TextFilter | None = None  # what has ended the text

    def restart(self) -> None:
        """Forgets the text, because another one follows."""
        self._filters = self.ended_by = None

    def feed(self, piece: str) -> str:
        """The text that is sure to stay now."""
        if self._filters is None:
            self._filters = self._make_filters()
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
        text = ""  # what ended within gives no more: the rest was dropped there
        for one in (self._filters or ()) if self.ended_by is None else ():
            text = (one.feed(text) if text else "") + ("" if one.is_over else one.end(is_cut=is_cut))
        self._filters = None  # it may be told its end twice
        return text


class WholeSentences(TextFilter):
    """Gives out whole sentences or lines until it has ``enough_words``; drops what is cut or came before."""

    def __init__(self, enough_words: int | None = None) -> None:
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
        is_start = is_cut and (self._end or num_words(self._text) < _FEWEST_WORDS)
        drops_rest = is_start or self._text.rstrip().endswith((":", "："))
        return self._give(self._end if drops_rest else len(self._text))

    def _give(self, end: int) -> str:
        given, self._num_given = self._text[self._num_given : end], max(self._num_given, end)
        return without_repetitions(given, self._said) if given else ""
