"""Thoughts that build on each other, as a user gives them. Knows text; does not know models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from string import Formatter

from pydantic import BaseModel, ConfigDict, Field

from sot_chains.outline.skeleton import Point


class Thought(BaseModel):
    """One part of an answer, written by one model call.

    Attributes:
        name: Its heading in the answer, which others refer to.
        prompt: The request. ``{question}`` stands for the user's question, and the name of another thought in
            braces for that thought's text, e.g. ``"Add up: {Costs}"``. Write literal braces as ``{{`` and
            ``}}``.
        needs: Further thoughts that are written before, and shown after the prompt.
    """

    model_config = ConfigDict(frozen=True)

    name: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    needs: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of thoughts in the prompt."""
        found = dict.fromkeys(name for _, name, _, _ in Formatter().parse(self.prompt))
        return tuple(name for name in found if name not in (None, "question"))

    @property
    def all_needs(self) -> tuple[str, ...]:
        """The names of all thoughts that are written before this one."""
        return tuple(dict.fromkeys((*self.fields, *self.needs)))

    def request(self, question: str, texts: Mapping[str, str]) -> str:
        """The prompt with the question, and with the texts of the thoughts it builds on, by their names."""
        values, parts = {**texts, "question": question}, Formatter().parse(self.prompt)
        filled = "".join(text + (values[name] if name is not None else "") for text, name, _, _ in parts)
        shown = [f"{name}: {text}" for name, text in texts.items() if name not in self.fields]
        return "\n\n".join([filled, *shown])


def numbered(thoughts: Sequence[Thought]) -> tuple[Point, ...]:
    """The thoughts as points, with the numbers of those they build on.

    Raises:
        ValueError: There is none, a name stands twice or is unknown, or thoughts need each other in a circle.
    """
    if not thoughts:
        raise ValueError("a graph needs at least one thought")
    numbers: dict[str, int] = {}
    for number, thought in enumerate(thoughts, 1):
        if numbers.setdefault(thought.name, number) != number:
            raise ValueError(f"two thoughts are named {thought.name!r}: give each a name of its own")
    for thought in thoughts:
        if unknown := [name for name in thought.all_needs if name not in numbers]:
            raise ValueError(
                f"{thought.name!r} builds on {unknown}, but there are only {sorted(numbers)}, and "
                "{question} in prompts"
            )
    try:
        TopologicalSorter({thought.name: thought.all_needs for thought in thoughts}).prepare()
    except CycleError as error:
        raise ValueError(f"thoughts build on each other in a circle: {' <- '.join(error.args[1])}") from None
    return tuple(
        Point(number, thought.name, tuple(sorted(numbers[name] for name in thought.all_needs)))
        for number, thought in enumerate(thoughts, 1)
    )


def mermaid(points: Sequence[Point]) -> str:
    """A flowchart of points and what they build on, in the language of Mermaid."""
    lines = ["flowchart TD"]
    for point in points:
        label = re.sub(r"[\"#&<>\n]", lambda match: f"#{ord(match[0])};", point.text)
        lines.append(f'    n{point.number}["{label}"]')
    lines += [f"    n{need} --> n{point.number}" for point in points for need in point.needs]
    return "\n".join(lines)
