"""A grammar of answers that are quotations: consecutive sentences of one passage.

A model that is too small to keep to its passages chooses which of them to quote, and cannot make up any.
Knows texts. Does not know models; the grammar is one of ``llguidance``, in the syntax of Lark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile

from retrieval_copy.citations.questions import Question
from retrieval_copy.citations.sentences import placed_sentences
from retrieval_copy.citations.support import NOT_HELD, are_about

_MOST_SENTENCES = 3
_NEARLY = 0.05  # what the scores of sentences to choose from may differ by
_MOST_QUOTATIONS = 40  # the time to read a grammar grows with its length


def quoting_grammar(passages: Sequence[str], asked: Question) -> str | None:
    """The grammar of one to three consecutive sentences of a passage; ``None`` if there are no sentences.

    The first is one that answers the question nearly as well as the best, by its score. It also allows
    :data:`~retrieval_copy.citations.support.NOT_HELD` if the passages are about something else than the
    question: small models say so of many that hold the answer.
    """
    quotations: list[tuple[float, str]] = []
    for passage in passages:
        parts = placed_sentences(passage)
        for number, first in enumerate(parts):
            if not first.may_answer:
                continue
            following = takewhile(lambda one: one.may_follow, parts[number + 1 : number + _MOST_SENTENCES])
            texts = [first.text, *(f" {one.text}" for one in following)]
            run = " (".join(json.dumps(text, ensure_ascii=False) for text in texts) + ")?" * (len(texts) - 1)
            quotations.append((asked.score(first), run))
    if not quotations:
        return None
    best = max(score for score, _ in quotations)
    chosen = list(dict.fromkeys(run for score, run in quotations if score >= best - _NEARLY))
    otherwise = "" if are_about(passages, asked) else f" | {json.dumps(NOT_HELD)}"
    return f"start: QUOTATION{otherwise}\nQUOTATION: {' | '.join(chosen[:_MOST_QUOTATIONS])}"
