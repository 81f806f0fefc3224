"""What a question asks for, and how far a text answers it: by words and by kinds of answers, such as numbers.

Knows texts, and the question words of five languages; of others the words alone count. Does not know models.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import regex

from retrieval_copy.citations.sentences import Sentence
from retrieval_copy.citations.words import LANGUAGES, terms

COMMON = frozenset(term for language in LANGUAGES for term in terms(language["function_words"]))
"""Words of questions that name no topic."""


def _any_of(*names: str, also: str = "(?!)") -> regex.Pattern[str]:
    words = [
        word
        for language in LANGUAGES
        for name in names
        for word in (language[name].split() if isinstance(language[name], str) else language[name])
    ]
    return regex.compile(rf"\b(?:{'|'.join(words)})\b|{also}", regex.IGNORECASE)


# What asks for a kind of answer, what surely is of the kind, and what may be.
_KINDS = [
    (_any_of("amount"), regex.compile(r"\d+"), _any_of("numbers")),
    (_any_of("count"), _any_of("numbers", also=r"\d+"), regex.compile("(?!)")),
    (
        _any_of("time"),
        _any_of("dates", also=r"\b(?:1\d\d\d|20\d\d|\d+[.:]\d\d)\b"),
        _any_of("conditions", "numbers", also=r"\d+"),
    ),
    (_any_of("person"), regex.compile(r"(?<=[\w,:;] )\p{Lu}\p{Ll}+"), regex.compile(r"\w+")),
]
_SURE, _MAYBE, _ABOVE, _CONTINUED, _MIN_SHARE = 0.5, 0.3, 0.6, 0.2, 0.5
# What words and kinds weigh beside the cosines of all-MiniLM-L6-v2, and the least score of an answer.
_WORDS, _KIND, _MIN_SCORE = 0.7, 0.4, 0.98


class Question:
    """What a question asks for.

    Args:
        text: The question.
        likeness: How near sentences are to it in meaning, by their text in context; without, words count.

    Attributes:
        terms: Its words that name the topic.
    """

    def __init__(self, text: str, likeness: Mapping[str, float] | None = None) -> None:
        self.text, self._likeness, topic = text, likeness or {}, text
        for asks, _, _ in _KINDS:
            topic = asks.sub(" ", topic)
        self._kind = next((kind[1:] for kind in _KINDS if kind[0].search(text)), _KINDS[-1][1:])
        named = [word for word in terms(topic) if len(word) > 1 or not word.isascii()]
        self.terms = frozenset(named) - COMMON or frozenset(terms(text)) - COMMON or frozenset(terms(text))

    def score(self, sentence: Sentence) -> float:
        """How well ``sentence`` answers it, to compare sentences by."""
        continued = self.among(sentence.before) if self.among(sentence.text) else ()
        share = self.share(sentence) + _CONTINUED * len(continued) / max(1, len(self.terms))
        kind, likeness = self._kind_of(sentence.text), self._likeness.get(sentence.in_context)
        return share + kind if likeness is None else _WORDS * share + _KIND * kind + likeness

    def is_answered_by(self, sentence: Sentence) -> bool:
        """Whether ``sentence`` has most of its words; or of three half, and surely what is asked.

        If its likeness is known, whether its score is high enough.
        """
        kind, share = self._kind_of(sentence.text), self.share(sentence)
        if sentence.in_context in self._likeness:
            return kind > 0 and self.score(sentence) >= _MIN_SCORE
        is_half_enough = kind == _SURE and len(self.terms) > 2
        is_enough = share > _MIN_SHARE or (is_half_enough and share == _MIN_SHARE)
        return is_enough and kind > 0 and bool(self.among(sentence.text))

    def share(self, sentence: Sentence) -> float:
        """The share of its words that ``sentence`` has; those of the headings above it count less."""
        held, above = self.among(sentence.text), self.among(sentence.headings)
        return (len(held) + _ABOVE * len(above - held)) / max(1, len(self.terms))

    def among(self, text: str) -> frozenset[str]:
        """Its words that ``text`` has."""
        return self.terms & _terms_in(text)

    def _kind_of(self, text: str) -> float:
        surely, maybe = self._kind
        return _SURE if self._has_new(surely, text) else _MAYBE if self._has_new(maybe, text) else 0.0

    def _has_new(self, kind: regex.Pattern[str], text: str) -> bool:
        """Whether ``text`` has a word of ``kind`` that the question does not have itself."""
        return any(not self.terms.issuperset(terms(match[0])) for match in kind.finditer(text))


@lru_cache(4096)
def _terms_in(text: str) -> frozenset[str]:
    return frozenset(terms(text))
