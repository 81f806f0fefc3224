"""A grammar of answers that are quotations: consecutive sentences of one passage.

A model that is too small to keep to its passages chooses which of them to quote, and cannot make up any.
Knows texts. Does not know models; the grammar is one of ``llguidance``, in the syntax of Lark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import regex

from retrieval_copy.citations.support import NOT_HELD, are_about
from retrieval_copy.citations.words import terms

_MOST_SENTENCES, _FEWEST_WORDS = 3, 3
# Sentences to choose from: the time to read a grammar grows with its length.
_MOST_CHARACTERS = 20_000
_LONGEST_SENTENCE = 600
# A sentence ends at its mark, unless that is the one of a number, an initial or an abbreviation, and where a
# paragraph, a heading or an item of a list ends. Two sentences taken for one do less harm than half of one.
_ABBREVIATIONS = (
    "mr|mrs|ms|dr|prof|st|sr|jr|vs|no|nos|fig|figs|vol|pp|approx|ca|cf|al|dept|inc|ltd|co|corp|mt|ft|ave|blvd|"
    "gen|sen|rep|gov|capt|col|lt|sgt|rev|hon|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec|[ap]\\.m"
)
SENTENCE_END = regex.compile(
    rf"(?<=[.!?…][\"'”’)\]]*)(?<!(?:\b\d{{1,2}}|(?<![^\s.(])\p{{Lu}}|\b(?i:{_ABBREVIATIONS}))\.)\s+(?!\p{{Ll}})"
    r"|(?<=[。！？][”’」』）]*)"
    r"|\n\s*\n|\n(?=\s*(?:[-*+#>|]|\d+[.)])\s)|\n(?<=^#.*\n)",
    regex.MULTILINE,
)
_QUESTION = regex.compile(r"[?？][\"'”’)\]]*$")
_CONTROL = regex.compile(r"[\p{Cc}\p{Cs}]")
_MARKUP = regex.compile(r"^(?:[-*+#>|]+|\d+[.)])\s+")


def quoting_grammar(passages: Sequence[str], question: str) -> str | None:
    """The grammar of one to three consecutive sentences of a passage; ``None`` if there are no sentences.

    It also allows :data:`~retrieval_copy.citations.support.NOT_HELD` if they are about something else than
    the question: small models say so of many passages that hold the answer. Of long passages the sentences
    that share most words with the question can be quoted.
    """
    asked = set(terms(question))
    quotations: list[tuple[int, str]] = []
    for passage in passages:
        parts = sentences(passage)
        for number, first in enumerate(parts):
            # A heading, a fragment or a question answers nothing.
            if len(terms(first)) < _FEWEST_WORDS or _QUESTION.search(first):
                continue
            run = json.dumps(first, ensure_ascii=False)
            closing = ""
            for following in parts[number + 1 : number + _MOST_SENTENCES]:
                if _QUESTION.search(following):
                    break
                run += f" ({json.dumps(' ' + following, ensure_ascii=False)}"
                closing += ")?"
            quotations.append((len(asked.intersection(terms(first))), run + closing))
    room = _MOST_CHARACTERS
    chosen: dict[str, None] = {}
    for _, quotation in sorted(quotations, key=lambda pair: -pair[0]):
        room -= len(quotation)
        if room < 0 and chosen:
            break
        chosen[quotation] = None
    if not chosen:
        return None
    otherwise = "" if are_about(passages, question) else f" | {json.dumps(NOT_HELD)}"
    return f"start: QUOTATION{otherwise}\nQUOTATION: {' | '.join(chosen)}"


def sentences(text: str) -> list[str]:
    """The sentences of ``text`` on one line each, without those too long to be any or with rubbish."""
    parts = (" ".join(_MARKUP.sub("", part.strip()).split()) for part in SENTENCE_END.split(text))
    return [
        part
        for part in parts
        if len(part) <= _LONGEST_SENTENCE and any(map(str.isalnum, part)) and not _CONTROL.search(part)
    ]
