"""Sentences of a text, also of one with lists, headings and rows of tables. Knows texts alone."""

from __future__ import annotations

from typing import NamedTuple

import regex

from retrieval_copy.citations.words import LANGUAGES, terms

_LONGEST_SENTENCE, _FEWEST_WORDS, _BREAK = 600, 3, "\n"
# A sentence ends at its mark, unless that is the one of a number, an initial or an abbreviation, and where a
# paragraph, a heading or an item of a list ends. Two sentences taken for one do less harm than half of one.
_ABBREVIATIONS = "|".join(
    word for language in LANGUAGES for word in language.get("abbreviations", "").split()
)
SENTENCE_END = regex.compile(
    rf"(?<=[.!?…][\"'”’)\]]*)(?<!(?:\b\d{{1,2}}|(?<![^\s.(])\p{{L}}|\b(?i:{_ABBREVIATIONS}))\.)\s+(?!\p{{Ll}})"
    r"|(?<=[。！？][”’」』）]*)"
    r"|\n\s*\n|\n(?=\s*(?:[-*+#>|]|\d+[.)])\s)|\n(?<=^#.*\n)",
    regex.MULTILINE,
)
_QUESTION = regex.compile(r"[?？][\"'”’)\]]*$")
_CONTROL = regex.compile(r"[\p{Cc}\p{Cs}]")
_CELLS = regex.compile(r"(?:^|; )[^:;]+: ([^;]+)")  # of a row that names its columns
_REFERRING = regex.compile(rf"(?i:{'|'.join(filter(None, (one.get('referring') for one in LANGUAGES)))})\b")
_MARKUP = regex.compile(r"^(?:[-*+#>|]+|\d+[.)])\s+")


class Sentence(NamedTuple):
    """A sentence of a passage, on one line, and where it stands."""

    text: str
    headings: str  # the first line of the passage, and the last heading or fragment
    before: str  # the sentence that it follows
    may_follow: bool  # whether it may be quoted after another: a heading, a question or a row may not
    may_answer: bool  # whether it may be quoted by itself: a fragment may not, either

    @property
    def contexts(self) -> list[str]:
        """The text below the last heading, to compare by meaning; of a row of a table, parts of it, too.

        What begins with a pronoun stands behind the sentence that it follows.
        """
        named = _CELLS.findall(self.text) if "; " in self.text else []
        said = ", ".join(named) or (
            f"{self.before} {self.text}" if _REFERRING.match(self.text) else self.text
        )
        whole = f"{self.headings.rpartition(_BREAK)[2]} {said}".strip()
        return [whole, *(f"{named[0]}, {cell}" for cell in named[1:])]


def placed_sentences(passage: str) -> list[Sentence]:
    """The sentences of ``passage``, where they stand in it; without those too long or with rubbish."""
    found: list[Sentence] = []
    first = heading = before = ""
    for part in SENTENCE_END.split(passage):
        text = " ".join(_MARKUP.sub("", part.strip()).split())
        if len(text) > _LONGEST_SENTENCE or not any(map(str.isalnum, text)) or _CONTROL.search(text):
            continue
        may_follow = not part.lstrip().startswith("#") and not _QUESTION.search(text)
        is_long = len(terms(text)) >= _FEWEST_WORDS
        places, is_row = f"{first}{_BREAK}{heading}", "; " in text and bool(_CELLS.match(text))
        found.append(Sentence(text, places, before, may_follow and not is_row, may_follow and is_long))
        first, before = first or text, text
        if not found[-1].may_answer:
            heading, before = text, ""
    return found
