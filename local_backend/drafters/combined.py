"""Several drafters at once: for each row the one, or the mix, that would have gained most lately.

What a drafter would have gained can be told in hindsight for all of them, drafted or not: every member
proposes, the row then writes, and how far each proposal agrees with what was written is its gain. A member
that lives on what its verified guesses teach it does worse while it rests; so what it misses then does not
count, and from time to time it is drafted again for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from local_backend.draft import Draft, Outcome
from local_backend.drafters.base import Drafter, WritingRow
from local_backend.drafters.per_row import PerRow

# Gains are averaged with weights that fall to a third in ten forwards; older ones are not kept.
_RATE = 0.1
_KEPT_FORWARDS = 32
_FIRST_PROMISE_TOKENS = 0.3
# How long a member that has rested is tried, and a row is not yet an example to others.
_TRIAL_FORWARDS = 8

# Of each member: how many tokens of its proposal the row then wrote; None where that tells nothing.
Gains = tuple[int | None, ...]


@dataclass(slots=True)
class _State:
    resting_forwards: list[int]  # of each member, since it was last drafted for what it promised
    gains: deque[Gains] = field(default_factory=lambda: deque(maxlen=_KEPT_FORWARDS))
    proposals: list[Draft] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    num_forwards: int = 0


class Combined:
    """Per row, the members whose drafts together promise most accepted tokens for their cost.

    Args:
        drafters: The members, in order of preference among equals.
        max_draft_tokens: Size of the merged tree, at most.
        token_cost: What one draft token costs, in forwards; a member is drafted where it promises more.
        explore_every: A member that has rested for so many forwards of a row is tried again.

    Raises:
        ValueError: There is no member, or a number is out of range.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        max_draft_tokens: int = 32,
        token_cost: float = 0.01,
        explore_every: int = 64,
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
        self._shared_gains: deque[Gains] = deque(maxlen=_KEPT_FORWARDS)
        self._num_rows = 0
        self._states = PerRow(self._begin)

    def propose(self, rows: Sequence[WritingRow]) -> Sequence[Draft]:
        """For each row the merged drafts of the members chosen."""
        proposals = zip(*(member.propose(rows) for member in self.drafters), strict=True)
        return [self._mix(row, list(drafts)) for row, drafts in zip(rows, proposals, strict=True)]

    def observe(self, rows: Sequence[WritingRow], outcomes: Sequence[Outcome]) -> None:
        """Judge every member's proposal by what was written, and let every member learn."""
        for row, outcome in zip(rows, outcomes, strict=True):
            state = self._states[row]
            state.num_forwards += 1
            gains = _gains(state, outcome)
            if all(gain is None for gain in gains):
                continue  # or what is known of those that rest would be forgotten
            state.gains.append(gains)
            if state.num_forwards > _TRIAL_FORWARDS:
                self._shared_gains.append(gains)
        for member in self.drafters:
            member.observe(rows, outcomes)

    def _mix(self, row: WritingRow, proposals: list[Draft]) -> Draft:
        state = self._states[row]
        size = self.max_draft_tokens
        state.proposals = [draft.truncated(max_tokens=size, max_depth=row.room - 1) for draft in proposals]
        state.chosen = self._choose(state)
        return Draft.merged((state.proposals[member] for member in state.chosen), max_tokens=size)

    def _begin(self, _: WritingRow) -> _State:
        # Rows begin at different points of the cycle, so that short ones, too, try those that rest.
        self._num_rows += 1
        rested = self._num_rows * (_TRIAL_FORWARDS + 1) % self.explore_every
        return _State([rested] * len(self.drafters))

    def _choose(self, state: _State) -> list[int]:
        """Members to draft: those on trial, then greedily whoever promises most beside them."""
        rested = state.resting_forwards
        chosen = [member for member, forwards in enumerate(rested) if forwards >= self.explore_every]
        left = [member for member in range(len(self.drafters)) if member not in chosen]
        for member in range(len(rested)):
            rested[member] = (rested[member] + 1) % (self.explore_every + _TRIAL_FORWARDS)
        history = list(state.gains)
        if len(history) < _KEPT_FORWARDS:
            history = [*self._shared_gains, *history]
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
            rested[member] = 0
            size += len(state.proposals[member])
            best = [max(had, gains[member] or 0) for gains, had in zip(history, best, strict=True)]
        return chosen


def _gains(state: _State, outcome: Outcome) -> Gains:
    gains: list[int | None] = []
    for member, draft in enumerate(state.proposals):
        gain = len(draft.places_along(outcome.token_ids))
        gains.append(gain if gain or (draft and member in state.chosen) else None)
    return tuple(gains)


def _promise(gains: Sequence[int | None], had: Sequence[int]) -> float:
    """Tokens a member is expected to add to what others have, in a forward in which it proposes something.

    A running mean that begins high enough for whoever has hardly been judged to get a chance.
    """
    promise = _FIRST_PROMISE_TOKENS
    for gain, best in zip(gains, had, strict=True):
        if gain is not None:
            promise += _RATE * (max(0, gain - best) - promise)
    return promise
