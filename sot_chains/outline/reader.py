"""The reply to a skeleton request while it is being written: which points of it are certain by now.

Knows skeletons, not models: what a reply was begun with is asked of the caller.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection
from operator import itemgetter

from sot_chains.outline.list_parser import OutlineParser, read_marker
from sot_chains.outline.skeleton import Point
from sot_chains.outline.words import HAN, HAN_CHARACTER, num_words

_MAX_CHARACTERS = 20_000  # a longer reply is no outline
_ARTICLE = 3  # letters, at most
_MAX_WORDS = 25  # of a heading, by the median: longer ones are an answer already


def outline_grammar(last: int, num_words: int, question: str) -> str:
    """A grammar (``llguidance``) of the headings 1 to ``last``; the first number is written already.

    Left alone, some small models explain each point behind a colon or write headings that are sentences,
    which takes longer than the points themselves. When the words come to an end some leave the spaces out, or
    change into a script that has none and that the question is not in.
    """
    lines = ""
    for number in range(last, 1, -1):
        lines = f' ("\\n{number}." HEADING{lines})?'
    others = "" if HAN_CHARACTER.search(question) else HAN
    word = rf"[^\s:：–—,{others}]{{1,24}},?"
    return f"start: HEADING{lines}\nHEADING: / ?{word}( {word}){{0,{num_words - 1}}}/"


class OutlineReader:
    """Reads the reply to a skeleton request and gives out each point as soon as it is certain.

    What was given out stays: another attempt only adds to it. Outlines have no fault, see :meth:`find_fault`.

    Args:
        max_points: How many points to take, at least 2; ``None`` takes all.
        most_words, most_alike: See :class:`~sot_chains.outline.list_parser.OutlineParser`.
        fewest: How many points make an outline.
        example_headings: Those of the examples, with case folded.

    Attributes:
        reply_start: What the reply was begun with, set before its text. A model may continue it or start
            again.
        text: The reply so far.
    """

    def __init__(
        self,
        max_points: int | None = None,
        most_words: int | None = None,
        most_alike: float = 1.0,
        fewest: int = 2,
        example_headings: Collection[str] = (),
    ) -> None:
        self.reply_start: str | None = None
        self._bounds = most_words, most_alike
        self._max_points, self._fewest = max_points, min(fewest, max_points or fewest)
        self._example_headings = example_headings
        self._given: list[str] = []
        self.restart()

    def restart(self) -> None:
        """Forgets the reply, because another attempt follows."""
        self.text = ""
        self._first_line: str | None = ""  # until it is known whether the model starts again
        self._parser = OutlineParser(*self._bounds)

    def feed(self, text: str) -> None:
        """Reads the next piece of the reply."""
        self.text += text
        if self._first_line is None:
            self._parser.feed(text)
            return
        self._first_line += text
        marker = read_marker(self._first_line.strip())
        if "\n" in self._first_line.lstrip() or (marker and marker.end < len(self._first_line.strip())):
            self._begin()

    def _begin(self) -> None:
        """Reads the first line, behind what the reply was begun with unless it has a marker of its own."""
        first, self._first_line = self._first_line or "", None
        start = self.reply_start or ""
        self._parser.feed(first if read_marker(first.strip()) else start + first)

    def end(self, *, is_cut: bool = False) -> None:
        """Reads the end of the reply; ``is_cut`` drops the point being written, which may not be whole."""
        if self._first_line is not None:
            self._begin()
        if not is_cut:
            self._parser.end()

    @property
    def is_over(self) -> bool:
        """Whether nothing that follows in the reply can add a point."""
        parser = self._parser
        is_full = len(parser.headings) == self._max_points or len(self.text) > _MAX_CHARACTERS
        return is_full or parser.is_over or parser.has_repeated

    @property
    def headings(self) -> list[str]:
        """The headings read so far, without repetitions."""
        return self._parser.headings[: self._max_points]

    def find_fault(self) -> str | None:
        """Why the headings are no outline; ``None`` if they are. Before the end those to come may mend it."""
        headings = self.headings
        if self._parser.num_sentences > len(headings):
            return "the points of the skeleton are sentences"
        if len(headings) < self._fewest:
            found = f"{len(headings) or 'no'} usable point{'s' * (len(headings) != 1)}"
            return f"the skeleton has {found}, fewer than {self._fewest}"
        folded = [*map(str.casefold, headings)]
        if 2 * sum(map(self._example_headings.__contains__, folded)) >= len(headings):
            return "the skeleton copies the headings of the examples"
        word, count = Counter(map(itemgetter(0), map(str.split, folded))).most_common(1)[0]
        if self._bounds[1] < 1.0 and count > max(2, len(headings) / 2) and len(word) > _ARTICLE:
            return f"{count} of {len(headings)} points of the skeleton begin with {word!r}"
        words = statistics.median(map(num_words, headings))
        if words > _MAX_WORDS:
            return f"the points of the skeleton are whole paragraphs, of {words:g} words by the median"
        return None

    def take(self) -> list[Point]:
        """The points that have become certain since the last call."""
        given, new = set(map(str.casefold, self._given)), list[Point]()
        for heading in self._parser.headings[len(given) :]:
            if heading.casefold() not in given and len(self._given) != self._max_points:
                self._given.append(heading)
                new.append(Point(len(self._given), heading))
        return new
