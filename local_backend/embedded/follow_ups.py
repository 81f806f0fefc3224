"""Questions that follow others up, and the same as they stand alone.

They are about subjects made up anew for every case (:mod:`~local_backend.embedded.facts`), so that a model
must take the subject from the conversation. Knows no tokenizers and no training.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache

from local_backend.embedded.facts import Family, Values, families
from local_backend.embedded.invented import value_of


@dataclass(frozen=True)
class FollowedUp:
    """A question with its answer, and follow-ups to it.

    Attributes:
        question: What was asked first.
        answer: What was answered.
        follow_ups: Of each the question as it follows, and as it stands alone.
    """

    question: str
    answer: str
    follow_ups: tuple[tuple[str, str], ...]


def followed_up(rng: random.Random, count: int = 1) -> FollowedUp:
    """Questions about one invented subject, some of them about another one in its place.

    Args:
        rng: Where every choice comes from.
        count: How many follow-ups, at most: where little is known of a subject there are fewer.
    """
    family = rng.choice([family for family in families() if len(_named(family)) > 1])
    (sentence, first), *others = rng.sample(_named(family), min(count + 1, len(_named(family))))
    values = Values(value_of(family.subject, rng), rng)
    other_subjects = [value_of(family.subject, rng) for _ in others]
    answer, question = values.fill(sentence), values.fill(first)
    answer = answer[0].upper() + answer[1:]
    follow_ups = tuple(
        _follow_up(family, values, (first, second), other, rng)
        for (_, second), other in zip(others, other_subjects, strict=True)
    )
    return FollowedUp(question, answer, follow_ups)


def _follow_up(
    family: Family, values: Values, questions: tuple[str, str], other: str, rng: random.Random
) -> tuple[str, str]:
    """The second question, or the first about another subject, as it follows and as it stands alone."""
    first, second = questions
    draw = rng.random()
    if draw < 0.3:
        asked = rng.choice(("What about {0}?", "And {0}?", "How about {0}?", "And what about {0}?"))
        return asked.format(other), _named_as(other, values, first)
    standalone = values.fill(second)
    part_of_a_name = re.search(r"the \{s\} (reservoir|museum|power|database)", second)
    if draw < 0.42 or part_of_a_name:  # it stands alone already
        return standalone, standalone
    pronouns = (
        ("it", "it", "this", "that one") if family.subject != "person" else ("this person", "the same person")
    )
    follow_up = _named_as(rng.choice(pronouns), values, second.replace("the {s}", "{s}"))
    if rng.random() < 0.4:
        follow_up = f"And {follow_up[0].lower()}{follow_up[1:]}"
    return follow_up, standalone


def _named_as(subject: str, values: Values, template: str) -> str:
    """A template filled with the values, but for the subject."""
    known = values["s"]
    values.rename(subject)
    filled = values.fill(template)
    values.rename(known)
    return filled


@cache
def _named(family: Family) -> list[tuple[str, str]]:
    """Sentences with a question that names the family's subject."""
    return [
        (fact.sentence, question)
        for fact in family.facts
        for question, _ in fact.questions
        if "{s}" in question
    ]
