"""Several drafters at once: for each row the one, or the mix, that would have gained most lately.

What a drafter would have gained can be told in hindsight for all of them, drafted or not: every member
proposes, the row then writes, and how far each proposal agrees with what was written is its gain. So no
forward is spent on finding out who is good; only those that learn from verified guesses must have theirs
verified from time to time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from local_backend.draft import Draft, Outcome
from local_backend.drafters.base import Drafter, WritingRow
from local_backend.drafters.per_row import PerRow

# Forwards over which the gain is judged: the row's own, filled up with those of all rows lately.
_ROW_FORWARDS = 24
_SHARED_FORWARDS = 64
_ENOUGH_FORWARDS = 8

# Of each member: how many tokens of its proposal the row then wrote; None where it proposed nothing.
Gains = tuple[int | None, ...]


@dataclass(slots=True)
class _State:
    gains: deque[Gains] = field(default_factory=lambda: deque(maxlen=_ROW_FORWARDS))
    proposals: list[Draft] = field(default_factory=list)
    idle_forwards: list[int] = field(default_factory=list)  # of each member, since it was last drafted


class Combined:
    """Per row, the members whose drafts together promise most accepted tokens for their cost.

    Args:
        drafters: The members, in order of preference among equals.
        max_draft_tokens: Size of the merged tree, at most.
        token_cost: What one draft token costs, in forwards; a member is drafted where it promises more.
        explore_every: A member not drafted for so many forwards of a row is drafted once, before the others.

    Raises:
        ValueError: There is no member, or a number is out of range.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        max_draft_tokens: int = 24,
        token_cost: float = 0.01,
        explore_every: int = 16,
    ) -> None:
        if not drafters:
            raise ValueError("there is no drafter to choose from: give at least one")
        for name, value in (("max_draft_tokens", max_draft_tokens), ("explore_every", explore_every)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if token_cost < 0:
            raise ValueError(f"token_cost must be 0 or more, got {token_cost}")
        self.drafters = tuple(drafters)
        self.max_draft_tokens = max_draft_tokens
        self.token_cost = token_cost
        self.explore_every = explore_every
        self._shared_gains: deque[Gains] = deque(maxlen=_SHARED_FORWARDS)
        self._states = PerRow(lambda _: _State(idle_forwards=[0] * len(self.drafters)))

    def propose(self, rows: Sequence[WritingRow]) -> Sequence[Draft]:
        """For each row the merged drafts of the members chosen."""
        proposals = zip(*(member.propose(rows) for member in self.drafters), strict=True)
        return [self._mix(row, list(drafts)) for row, drafts in zip(rows, proposals, strict=True)]

    def observe(self, rows: Sequence[WritingRow], outcomes: Sequence[Outcome]) -> None:
        """Judge every member's proposal by what was written, and let every member learn."""
        for row, outcome in zip(rows, outcomes, strict=True):
            state = self._states[row]
            gains = tuple(
                len(draft.places_along(outcome.token_ids)) if draft else None for draft in state.proposals
            )
            state.gains.append(gains)
            self._shared_gains.append(gains)
        for member in self.drafters:
            member.observe(rows, outcomes)

    def _mix(self, row: WritingRow, proposals: list[Draft]) -> Draft:
        state = self._states[row]
        size = self.max_draft_tokens
        state.proposals = [draft.truncated(max_tokens=size, max_depth=row.room - 1) for draft in proposals]
        chosen = self._choose(state)
        state.idle_forwards = [
            0 if member in chosen else idle + 1 for member, idle in enumerate(state.idle_forwards)
        ]
        return Draft.merged((state.proposals[member] for member in chosen), max_tokens=size)

    def _choose(self, state: _State) -> list[int]:
        """Members to draft: those that are due, then greedily whoever promises most beside them."""
        chosen = [member for member, idle in enumerate(state.idle_forwards) if idle + 1 >= self.explore_every]
        left = [member for member in range(len(self.drafters)) if member not in chosen]
        history = list(state.gains)
        if len(history) < _ENOUGH_FORWARDS:
            history += self._shared_gains
        best = [max((gains[member] or 0 for member in chosen), default=0) for gains in history]
        size = sum(len(state.proposals[member]) for member in chosen)
        while left and size < self.max_draft_tokens:
            worth = {
                member: _promise([gains[member] for gains in history], best)
                - self.token_cost * min(len(state.proposals[member]), self.max_draft_tokens - size)
                for member in left
            }
            member = max(left, key=lambda member: worth[member])
            if worth[member] <= 0:
                break
            chosen.append(member)
            left.remove(member)
            size += len(state.proposals[member])
            best = [max(had, gains[member] or 0) for gains, had in zip(history, best, strict=True)]
        return [member for member in chosen if state.proposals[member]]


def _promise(gains: Sequence[int | None], had: Sequence[int]) -> float:
    """Tokens a member is expected to add to what others have, in a forward in which it proposes something.

    The mean of what it would have added, begun with one forward in which it added one token: who has
    hardly been judged gets a chance.
    """
    added = [max(0, gain - best) for gain, best in zip(gains, had, strict=True) if gain is not None]
    return (sum(added) + 1) / (len(added) + 1)
