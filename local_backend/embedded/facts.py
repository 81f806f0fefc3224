"""Families of facts (``corpus/facts.md``): sentences with fields, the questions they answer, invented values.

Knows no documents and no conversations.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache

from local_backend.embedded.corpus import CORPUS
from local_backend.embedded.invented import value_of

FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Fact:
    """A sentence with fields in braces, and questions it answers, each with the field it asks for."""

    sentence: str
    questions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Family:
    """Facts that are told of one kind of subject, whose field is ``{s}``."""

    name: str
    subject: str
    facts: tuple[Fact, ...]


@cache
def families() -> tuple[Family, ...]:
    """All of them."""
    families = []
    for block in (CORPUS / "facts.md").read_text("utf-8").split("\n# ")[1:]:
        heading, *lines = block.strip().splitlines()
        facts = []
        for line in lines:
            sentence, *questions = line.split(" | ")
            pairs = (question.split(" => ") for question in questions)
            facts.append(Fact(sentence, tuple((question, field) for question, field in pairs)))
        name, subject = heading.split()
        families.append(Family(name, subject.strip("{}"), tuple(facts)))
    return tuple(families)


class Values:
    """The values of one document's fields: the same field twice is the same value.

    Args:
        subject: Value of the field ``{s}``.
        rng: Where the other values come from.
    """

    def __init__(self, subject: str, rng: random.Random) -> None:
        self._rng = rng
        self._values = {"s": subject}

    def rename(self, subject: str) -> None:
        """Tell of another subject from here on."""
        self._values["s"] = subject

    def fill(self, template: str) -> str:
        """The template with values in place of its fields."""
        return FIELD.sub(lambda match: self[match[1]], template)

    def __getitem__(self, field: str) -> str:
        if field not in self._values:
            self._values[field] = value_of(field.rstrip("0123456789"), self._rng)
        return self._values[field]
