"""Few-shot examples for small models, shown as earlier chat turns. Knows text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sot_chains.outline.skeleton import Point, Skeleton
from sot_chains.outline.words import SENTENCE_END

Detail: TypeAlias = Literal["brief", "normal", "full"]


@dataclass(frozen=True)
class Example:
    """A question with the skeleton of its answer and the expansion of one point.

    Shown to small models as earlier chat turns, since they copy examples that are part of the request.

    Attributes:
        question: The question.
        skeleton: The skeleton of its answer.
        number: The number of the expanded point.
        text: The expansion.
    """

    question: str
    skeleton: Skeleton
    number: int
    text: str

    @property
    def point(self) -> Point:
        """The expanded point."""
        return self.skeleton.points[self.number - 1]

    def expansion(self, detail: Detail) -> str:
        """The expansion in a level of detail."""
        end = SENTENCE_END.search(self.text) if detail == "brief" else None
        return self.text[: end.end()] if end else self.text
