"""Tells whether the passages support an answer, by words alone.

Long words are rare ones, so a word weighs more the more letters it has, and words are compared by their
beginnings, so that inflected forms agree. Knows texts. Does not know models.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from retrieval_copy.citations.citations import Citation
from retrieval_copy.citations.words import terms

NOT_HELD = "The passages do not hold the answer."
"""What a model is asked to say if it finds no answer."""

_MIN_COPIED_WORDS = 8
_MIN_SHARE_OF_QUESTION, _MIN_SHARE_OF_ANSWER = 0.5, 0.7
_NUM_COMPARED, _SHORT = 6, 3  # letters
# Words of questions that name no topic. Of other languages the short ones weigh little, too.
_FUNCTION_WORDS = """
    a about all also am an and any are as at be been being but by can could did do does for from had has
    have he her his how i if in into is it its may me might more most must my no not of on or our shall
    she should so some such than that the their them then there these they this those to us was we were
    what when where which while who whom whose why will with would you your
"""
_COMMON = frozenset(_FUNCTION_WORDS.split())


def is_supported(answer: str, question: str, passages: Sequence[str], citations: Sequence[Citation]) -> bool:
    """Whether ``passages`` are about ``question`` and ``answer`` was taken from them.

    That is, they have most of the question's rare words, and the answer shares eight words in a row with them
    or most of its rare words. A question in another script than theirs is not compared.
    """
    if not passages or not answer.strip() or NOT_HELD.rstrip(".").casefold() in answer.casefold():
        return False
    if not are_about(passages, question):
        return False
    if any(citation["num_tokens"] >= _MIN_COPIED_WORDS for citation in citations):
        return True
    said, known = terms(answer), sorted(set(terms(question)))
    new = [word for word in said if not _is_among(word, known)]
    return _share(new or said, _sorted_terms(passages)) >= _MIN_SHARE_OF_ANSWER


def are_about(passages: Sequence[str], question: str) -> bool:
    """Whether ``passages`` have most of the rare words of ``question``, or are in another script."""
    held, asked = _sorted_terms(passages), terms(question)
    is_comparable = not set("".join(asked)).isdisjoint("".join(held))
    return not is_comparable or _share(asked, held) >= _MIN_SHARE_OF_QUESTION


def _sorted_terms(texts: Iterable[str]) -> list[str]:
    return sorted({word for text in texts for word in terms(text)})


def _share(words: Iterable[str], held: Sequence[str]) -> float:
    """The share of distinct rare words that are held, by weight; 1 if there are none."""
    weights = {word: 1 + max(0, len(word) - _SHORT) for word in words if word not in _COMMON}
    total = sum(weights.values())
    return sum(weight for word, weight in weights.items() if _is_among(word, held)) / total if total else 1.0


def _is_among(word: str, words: Sequence[str]) -> bool:
    """Whether ``words``, which are sorted, have ``word`` in any form."""
    if len(word) <= _SHORT:
        return words[(index := bisect_left(words, word)) : index + 1] == [word]
    beginning = word[: max(_SHORT + 1, min(len(word) - 2, _NUM_COMPARED))]
    index = bisect_left(words, beginning)
    return index < len(words) and words[index].startswith(beginning)
