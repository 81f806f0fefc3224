"""Tells whether an answer was taken from the passages, and whether what it says is what was asked.

By words and kinds of answers alone. Knows texts. Does not know models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from retrieval_copy.citations.citations import Citation
from retrieval_copy.citations.questions import COMMON, Question
from retrieval_copy.citations.sentences import placed_sentences
from retrieval_copy.citations.words import terms

NOT_HELD = "The passages do not hold the answer."
"""What a model is asked to say if it finds no answer."""

REFUSAL = "Nothing in the documents answers this."

_MIN_COPIED_WORDS, _MIN_SHARE_OF_QUESTION, _MIN_SHARE_OF_ANSWER = 8, 0.5, 0.7


def is_supported(
    answer: str, asked: Question, passages: Sequence[str], citations: Sequence[Citation], begun: bool = False
) -> bool:
    """Whether ``answer`` was taken from ``passages`` and is about what is ``asked``.

    That is, it shares eight words in a row with them, or most of its rare words; and the passages have most
    of the question's rare words. What is copied also has to have them, or stand below them, and to hold the
    kind of answer that is asked for. A question in another script than theirs is not compared.

    Of the first sentences of one that is ``begun`` it says whether that holds however it goes on, short of
    saying that the passages do not hold it.
    """
    if not passages or not answer.strip() or NOT_HELD.rstrip(".").casefold() in answer.casefold():
        return False
    new = frozenset(terms(answer)) - COMMON.union(terms(asked.text)) or frozenset(terms(answer))
    is_like = not begun and len(new & _all_terms(passages)) >= _MIN_SHARE_OF_ANSWER * len(new)
    is_taken = is_like or any(citation["num_tokens"] >= _MIN_COPIED_WORDS for citation in citations)
    is_taken = is_taken and are_about(passages, asked)
    answers = _answers(answer, asked, passages) if is_taken and _are_comparable(passages, asked) else is_taken
    return answers or (answers is None and not begun)


def _answers(answer: str, asked: Question, passages: Sequence[str]) -> bool | None:
    """Whether a sentence of ``passages`` that ``answer`` repeats, or a part of it, answers what is asked.

    ``None`` for an answer that repeats none: it is in the model's own words, which are not judged.
    """
    said = [frozenset(terms(part.text)) for part in placed_sentences(answer)]
    repeated = [
        sentence
        for passage in passages
        for sentence in placed_sentences(passage)
        if any(len(part & _all_terms([sentence.text])) >= _MIN_SHARE_OF_ANSWER * len(part) for part in said)
    ]
    return any(map(asked.is_answered_by, repeated)) if repeated else None


def are_about(passages: Sequence[str], asked: Question) -> bool:
    """Whether ``passages`` have most of the question's words or an answer, or are in another script."""
    share = len(asked.among("\n".join(passages))) / max(1, len(asked.terms))
    if share >= _MIN_SHARE_OF_QUESTION or not _are_comparable(passages, asked):
        return True
    return any(asked.is_answered_by(one) for passage in passages for one in placed_sentences(passage))


def _are_comparable(passages: Sequence[str], asked: Question) -> bool:
    """Whether any letter of the question is one of ``passages``."""
    return not set("".join(terms(asked.text))).isdisjoint("".join(_all_terms(passages)))


def _all_terms(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in terms(text)}
