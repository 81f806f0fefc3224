"""The small model that ships: where its weights lie, and whether a question is about something it knows.

Rebuilt by ``python -m local_backend.embedded.build``. The card beside the weights says what it is.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path

from local_backend.embedded.corpus import Topic, load_topics

WEIGHTS = Path(__file__).parent / "weights"

# A question must share this much of its weight in words with one topic. Chosen on questions outside the
# corpus; see the card.
_MIN_COVERED = 0.45
_WORD = re.compile(r"[a-z0-9]+")
_ENDINGS = re.compile(r"(?:ations?|ings?|ments?|ness|ies|ed|es|s|ly|e|y)$")


@cache
def known_topics(weights: Path = WEIGHTS) -> tuple[Topic, ...]:
    """The topics of the corpus that a model was taught: a corpus may have grown since its weights were made.

    Args:
        weights: The model's folder, which names them in ``topics.json``.
    """
    names = set(json.loads((weights / "topics.json").read_text("utf-8")))
    return tuple(topic for topic in load_topics() if topic.name in names)


def closest_topic(question: str) -> Topic | None:
    """The topic known to the embedded model a question is about, ``None`` where it is about none.

    A guess from words alone: the share of the question's words, weighted by how rare they are over the
    topics, that the topic's own questions use.
    """
    weights = _word_weights()
    unknown = max(weights.values())
    words = _words(question)
    total = sum(weights.get(word, unknown) for word in words)
    if not total:
        return None
    covered, topic = max(
        ((sum(weights[word] for word in words & known), topic) for topic, known in _topic_words()),
        key=lambda pair: pair[0],
    )
    return topic if covered / total >= _MIN_COVERED and covered >= unknown / 2 else None


def _words(text: str) -> frozenset[str]:
    return frozenset(
        stem for word in _WORD.findall(text.lower()) if len(stem := _ENDINGS.sub("", word) or word) > 2
    )


@cache
def _topic_words() -> tuple[tuple[Topic, frozenset[str]], ...]:
    return tuple((topic, _words(" ".join((topic.title, *topic.questions)))) for topic in known_topics())


@cache
def _word_weights() -> dict[str, float]:
    topics = _topic_words()
    counts = Counter(word for _, words in topics for word in words)
    return {word: math.log((1 + len(topics)) / count) for word, count in counts.items()}


__all__ = ["WEIGHTS", "closest_topic", "known_topics"]
