"""Rows as drafters see them, and made-up models: functions from a text to its next token.

With them any guess can be judged, and what a drafter proposes depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from local_backend import Drafter, Outcome
from local_backend.engine.verification import verify

NextToken = Callable[[Sequence[int]], int]


@dataclass(eq=False)
class FakeRow:
    """A row as drafters see it."""

    token_ids: list[int]
    max_length: int = 100
    references: tuple[tuple[int, ...], ...] = ()
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def room(self) -> int:
        return self.max_length - len(self.token_ids)


def step(drafter: Drafter, row: FakeRow, model: NextToken, *, max_draft_tokens: int = 1000) -> Outcome:
    """One forward of ``model``: what the engine does for a row."""
    (proposed,) = drafter.propose([row])
    draft = proposed.truncated(max_tokens=max_draft_tokens, max_depth=row.room - 1)
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    predictions = [model([*row.token_ids, *path]) for path in paths]
    outcome = verify(draft, lambda place: predictions[place + 1], predictions)
    row.token_ids.extend(outcome.token_ids)
    drafter.observe([row], [outcome])
    return outcome


def write(drafter: Drafter, row: FakeRow, model: NextToken, **options: int) -> int:
    """Fill the row; returns the forwards it took."""
    num_forwards = 0
    while row.room > 0:
        step(drafter, row, model, **options)
        num_forwards += 1
    return num_forwards


def by_last_two(text: Sequence[int]) -> int:
    """A text that depends on its last two tokens and takes long to repeat."""
    return (text[-1] * 31 + (text[-2] if len(text) > 1 else 0) * 17 + 5) % 101


def by_last(text: Sequence[int]) -> int:
    return (text[-1] * 5 + 3) % 97


def by_position(text: Sequence[int]) -> int:
    """The easiest case for Jacobi iteration: a wrong guess spoils nothing behind it."""
    return (len(text) * len(text) * 7) % 89
