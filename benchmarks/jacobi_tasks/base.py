"""Defines a task: cases drawn from a grammar, and a score for a model's answers.

Knows neither models nor training. A case always belongs to the same split, whatever else is drawn.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Split = Literal["train", "test"]
_TEST_SHARE = 12  # one prompt in this many is held out for testing


@dataclass(frozen=True)
class Case:
    """One prompt with its answer.

    Attributes:
        prompt: The text that the model continues.
        answer: A correct continuation, without the end token.
        facts: Data for the score, e.g. the rows of a database; JSON values only.
    """

    prompt: str
    answer: str
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)


class Task(Protocol):
    """A kind of case and how its answers are scored."""

    name: str

    def make(self, rng: random.Random, split: Split) -> Case | None:
        """Draw a case; ``None`` if the draw is unusable or belongs to the other split."""

    def score(self, cases: Sequence[Case], texts: Sequence[str]) -> list[bool]:
        """Whether each answer is correct, judged by what it does or says, not by its wording."""


def draw_cases(task: Task, split: Split, *, seed: int = 0) -> Iterator[Case]:
    """An endless stream of distinct cases, the same for the same seed."""
    rng = random.Random(f"{task.name}:{split}:{seed}")
    seen: set[str] = set()
    while True:
        case = task.make(rng, split)
        if case is not None and case.prompt not in seen:
            seen.add(case.prompt)
            yield case


def split_of(text: str) -> Split:
    """The split a prompt belongs to, by its digest: no test case is ever trained on."""
    digest = hashlib.sha256(text.encode()).digest()
    return "test" if int.from_bytes(digest[:4], "big") % _TEST_SHARE == 0 else "train"


def word_list(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())
