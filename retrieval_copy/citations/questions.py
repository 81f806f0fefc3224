"""What a question asks for, and how far a text answers it: by words and by kinds of answers, such as numbers.

Knows texts, and the question words of five languages; of others the words alone count. Does not know models.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from functools import lru_cache
from importlib.resources import files
from operator import itemgetter
from typing import NamedTuple

import regex

from retrieval_copy.citations.sentences import SENTENCE_END, Sentence
from retrieval_copy.citations.words import LANGUAGES, terms

COMMON = frozenset(term for language in LANGUAGES for term in terms(language.get("function_words", "")))
"""Words of questions that name no topic."""


class _Kind(NamedTuple):
    asks: regex.Pattern[str]
    surely: regex.Pattern[str]  # what is an answer of the kind
    maybe: regex.Pattern[str]  # what may be one


_NAMED, _NEVER = regex.compile(r"\{([a-z_]+)\}"), "(?!)"


def _compiled(expression: str) -> regex.Pattern[str]:
    return regex.compile(_NAMED.sub(_words, expression), regex.IGNORECASE)


def _words(named: regex.Match[str]) -> str:
    lists = [language[named[1]] for language in LANGUAGES if named[1] in language]
    words = [word for some in lists for word in (some.split() if isinstance(some, str) else some)]
    return rf"\b(?:{'|'.join(words)})\b"


_BY_NAME = {
    name: _Kind(*(_compiled(kind.get(part, _NEVER)) for part in _Kind._fields))
    for name, kind in tomllib.loads(files(__package__).joinpath("kinds.toml").read_text("utf-8")).items()
}
_KINDS, _COUNT = [*_BY_NAME.values()], _BY_NAME["count"]
_REFERS = _compiled(r"^\W*{follows}|{pronouns}")
_COLUMN = regex.compile(r"(\w+): \d")  # of a table, over a number
_NEAR = 3  # words between a number and what it counts
_SURE, _MAYBE, _ABOVE, _CONTINUED, _LEADING = 0.5, 0.25, 0.6, 0.2, 0.5
# What words and likeness weigh beside kinds, and the least score of an answer: from answers to questions
# about four folders, which were also asked without the passages that answer them.
_WORDS, _LIKENESS, _UNKNOWN, _MIN_SCORE = 0.7, 1.1, 0.87, 1.7


class Question:
    """What a question asks for.

    Args:
        text: The question; of several sentences, those that lead to the last question count half.
        likeness: How near sentences are to it in meaning, by their contexts: 0 as others, 1 as answers
            usually are. Without, all count as nearly as near as answers.

    Attributes:
        terms: Its words that name the topic.
        asks: Whether it is a question; a topic is better answered by a passage than by a sentence.
    """

    def __init__(self, text: str, likeness: Mapping[str, float] | None = None) -> None:
        self.text, self._likeness = text, likeness or {}
        asked = next((part for part in reversed(SENTENCE_END.split(text)) if "?" in part), text)
        asking = [(one.start(), kind) for kind in _KINDS if (one := kind.asks.search(asked))]
        asking = asking or [(0, kind) for kind in _KINDS if kind.asks.search(text)]
        self.asks = bool(asking) or not {"?", "？"}.isdisjoint(text)
        self._kind = min(asking, key=itemgetter(0), default=(0, _KINDS[-1]))[1]  # what is asked for first
        counts = self._kind is _COUNT and _COUNT.asks.search(asked)
        self._counted = frozenset(terms(asked[counts.end() :])[:1]) - COMMON if counts else frozenset()
        own, words = _topic(asked), frozenset(terms(text))
        self.terms = _topic(text) or words - COMMON or words
        self._weights = {term: 1.0 if term in own or not own else _LEADING for term in self.terms}

    def score(self, sentence: Sentence) -> float:
        """How well ``sentence`` answers it, to compare sentences by."""
        continued = self.among(sentence.before) if self.among(sentence.text) else ()
        held, above = self.among(sentence.text), self.among(sentence.headings)
        share = self._part(held) + _ABOVE * self._part(above - held) + _CONTINUED * self._part(continued)
        likeness = max(self._likeness.get(text, _UNKNOWN) for text in sentence.contexts)
        return _WORDS * share + self._kind_of(sentence.text) + _LIKENESS * likeness

    def is_answered_by(self, sentence: Sentence) -> bool:
        """Whether the score of ``sentence`` is high enough, and it may be of the kind that is asked for."""
        return self._kind_of(sentence.text) > 0 and self.score(sentence) >= _MIN_SCORE

    def _part(self, of_terms: Collection[str]) -> float:
        return sum(map(self._weights.__getitem__, of_terms)) / (sum(self._weights.values()) or 1.0)

    def among(self, text: str) -> frozenset[str]:
        """Its words that ``text`` has."""
        return self.terms & _terms_in(text)

    def _kind_of(self, text: str) -> float:
        if self._has_new(self._kind.surely, text) and (not self._counted or self._counts(text)):
            return _SURE
        maybe = self._kind.surely if self._counted else self._kind.maybe
        return _MAYBE if self._has_new(maybe, text) else 0.0

    def _counts(self, text: str) -> bool:
        """Whether a number stands shortly before the word of what is counted, or in its column."""
        words = terms(text)
        numbers = (n for n, one in enumerate(words) if _COUNT.surely.fullmatch(one))
        in_cell = any(not self._counted.isdisjoint(terms(name)) for name in _COLUMN.findall(text))
        return in_cell or any(not self._counted.isdisjoint(words[n + 1 : n + 1 + _NEAR]) for n in numbers)

    def _has_new(self, kind: regex.Pattern[str], text: str) -> bool:
        """Whether ``text`` has a word of ``kind`` that the question does not have itself."""
        return any(not self.terms.issuperset(terms(match[0])) for match in kind.finditer(text))


def is_follow_up(question: str) -> bool:
    """Whether ``question``, one line, refers to an earlier one: by its first word, a pronoun, or no topic."""
    return "\n" not in question and (bool(_REFERS.search(question)) or not _topic(question))


def _topic(question: str) -> frozenset[str]:
    for kind in _KINDS:
        question = kind.asks.sub(" ", question)
    return frozenset(word for word in terms(question) if len(word) > 1 or not word.isascii()) - COMMON


@lru_cache(4096)
def _terms_in(text: str) -> frozenset[str]:
    return frozenset(terms(text))
