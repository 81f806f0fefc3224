"""Combines several drafters: each row uses the one, or the mix, with the highest recent gain.

The gain of a member is the number of its proposed tokens that the row then emits. It is known afterwards even
if the proposal was not drafted. A member without gain rests, each time twice as long, and is not called
meanwhile. After a rest it is drafted on trial, because a drafter that learns from its own verified guesses
shows no gain while it rests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from local_backend.drafting.draft import Draft, Outcome
from local_backend.drafting.drafter import Drafter, PerRow, RowView, require_at_least

# Gains are averaged with weights that fall to a third in ten forwards; the last 32 are kept.
_RATE = 0.1
_KEPT_FORWARDS = 32
_FIRST_PROMISE_TOKENS = 0.25
_FIRST_CHANCE = _FIRST_PROMISE_TOKENS / (1 + _FIRST_PROMISE_TOKENS)  # of a token after an accepted one
# Trial after a rest: number of forwards, and draft tokens in each. Then the longest rest.
_TRIAL_FORWARDS, _TRIAL_TOKENS = 3, 12
_LONGEST_REST_FORWARDS = 512
# Minimum expected gain per forward; a member below it rests.
_LEAST_WORTH_TOKENS = 0.03

# Per member: how many tokens of its proposal the row then emitted; None if that is unknown.
Gains = tuple[int | None, ...]


@dataclass(slots=True)
class _Member:
    """State of one member for one row; rests and trials are counted in forwards."""

    next_rest: int
    rest_left: int = 0
    trial_left: int = 0
    proposal: Draft | None = None
    is_drafted: bool = False


@dataclass(slots=True)
class _State:
    members: list[_Member]
    gains: deque[Gains] = field(default_factory=lambda: deque(maxlen=_KEPT_FORWARDS))


@dataclass(eq=False)
class Combined:
    """Merges, for each row, the drafts of the members with the highest expected gain for their cost.

    Args:
        drafters: The members; earlier ones win ties.
        max_draft_tokens: Maximum size of the merged tree.
        token_cost: Cost of one draft token, in forwards, for members whose drafts have no probabilities; such
            a member is drafted only if its expected gain is higher.
        first_rest: Length of the first rest of a member without gain, in forwards of the row.

    Raises:
        ValueError: No member is given, or a number is out of range.
    """

    drafters: Sequence[Drafter]
    max_draft_tokens: int = field(default=63, kw_only=True)
    token_cost: float = field(default=0.01, kw_only=True)
    first_rest: int = field(default=128, kw_only=True)

    def __post_init__(self) -> None:
        if not self.drafters:
            raise ValueError("there is no drafter to choose from: give at least one")
        require_at_least(1, max_draft_tokens=self.max_draft_tokens, first_rest=self.first_rest)
        require_at_least(0, token_cost=self.token_cost)
        # Gains and rests from other rows, the starting point of new rows.
        self._shared_gains: deque[Gains] = deque(maxlen=_KEPT_FORWARDS)
        self._shared_rests = [0] * len(self.drafters)
        self._num_rows = 0
        self._states = PerRow(self._begin)

    def propose(self, rows: Sequence[RowView]) -> Sequence[Draft]:
        """For each row, the merged drafts of the chosen members."""
        states = [self._states[row] for row in rows]
        for number, drafter in enumerate(self.drafters):
            asked = [index for index, state in enumerate(states) if self._is_asked(state.members[number])]
            if asked:
                proposals = drafter.propose([rows[index] for index in asked])
                for index, proposal in zip(asked, proposals, strict=True):
                    states[index].members[number].proposal = proposal.truncated(
                        max_tokens=self.max_draft_tokens, max_depth=rows[index].room - 1
                    )
        return [self._mix(state) for state in states]

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Score every proposal against the emitted tokens, and pass the outcomes on to the members."""
        states = [self._states[row] for row in rows]
        for state, outcome in zip(states, outcomes, strict=True):
            gains = tuple(_gain(member, outcome) for member in state.members)
            if any(gain is not None for gain in gains):
                state.gains.append(gains)
                self._shared_gains.append(gains)
        for number, drafter in enumerate(self.drafters):
            asked = [
                index for index, state in enumerate(states) if state.members[number].proposal is not None
            ]
            if asked:
                drafter.observe([rows[index] for index in asked], [outcomes[index] for index in asked])

    def _begin(self, row: RowView) -> _State:
        self._num_rows += 1
        members = []
        for rest in self._shared_rests:
            member = _Member(self.first_rest)
            if rest and not row.references:  # it gained nothing on other rows
                # Stagger the end of the rest across rows, so that short rows, too, try it now and then.
                member.rest_left = 1 + self._num_rows * (_TRIAL_FORWARDS + 3) % rest
                member.next_rest = rest
            members.append(member)
        return _State(members)

    @staticmethod
    def _is_asked(member: _Member) -> bool:
        member.proposal, member.is_drafted = None, False
        if not member.rest_left:
            return True
        member.rest_left -= 1
        if not member.rest_left:
            member.trial_left = _TRIAL_FORWARDS
        return False

    def _mix(self, state: _State) -> Draft:
        weighed, taken_as_certain = [], []
        for number in self._choose(state):
            member = state.members[number]
            draft = member.proposal
            assert draft is not None
            if draft.probabilities:
                weighed.append(draft)
            elif draft:
                if member.trial_left:
                    draft = draft.truncated(max_tokens=_TRIAL_TOKENS, max_depth=_TRIAL_TOKENS)
                taken_as_certain.append(self._with_probabilities(draft, state, number))
            member.trial_left = max(0, member.trial_left - 1)
        tree = Draft.merged(weighed).likeliest(self.max_draft_tokens)
        return Draft.merged([tree, *taken_as_certain], max_tokens=self.max_draft_tokens)

    def _with_probabilities(self, draft: Draft, state: _State, number: int) -> Draft:
        """Add probabilities, derived from the member's gains, to a draft without any."""
        if any(gains[number] for gains in self._history(state)):
            # As if certain: Jacobi computes its next iterate from all of its guesses, right or wrong.
            probabilities = [1.0] * len(draft)
        else:  # no gain yet: low probabilities, so the forward widens only as far as it pays
            probabilities = [_FIRST_CHANCE**depth for depth in draft.depths()]
        return replace(draft, probabilities=tuple(probabilities))

    def _choose(self, state: _State) -> list[int]:
        """Pick members greedily by marginal gain, then those on trial; members without gain rest."""
        history = self._history(state)
        left = [number for number, member in enumerate(state.members) if member.proposal is not None]
        best = [0] * len(history)
        size = 0
        chosen: list[int] = []

        def take(number: int) -> None:
            nonlocal best, size
            member = state.members[number]
            assert member.proposal is not None
            member.is_drafted = True
            left.remove(number)
            chosen.append(number)
            size += len(member.proposal)
            best = [max(had, gains[number] or 0) for gains, had in zip(history, best, strict=True)]

        while left and size < self.max_draft_tokens:
            worth = {number: self._worth(state, number, history, best, size) for number in left}
            number = max(left, key=lambda number: worth[number])
            if worth[number] <= 0:
                break
            take(number)
            state.members[number].next_rest = self.first_rest
            self._shared_rests[number] = 0
        for number in list(left):
            member = state.members[number]
            if member.trial_left and size < self.max_draft_tokens:
                take(number)
                continue
            if size >= self.max_draft_tokens and len(history) < 2 * _TRIAL_FORWARDS:
                continue  # too early to rest because the others fill the draft
            assert member.proposal is not None
            if member.proposal.probabilities and len(state.gains) < 2 * _TRIAL_FORWARDS:
                continue  # nor to judge it by other rows' gains: it is scored even when not drafted
            member.rest_left = member.next_rest
            if size < self.max_draft_tokens:  # it rests for lack of gain, not of room
                member.next_rest = min(2 * member.next_rest, _LONGEST_REST_FORWARDS)
                self._shared_rests[number] = member.rest_left
        return chosen

    def _worth(
        self, state: _State, number: int, history: Sequence[Gains], best: Sequence[int], size: int
    ) -> float:
        proposal = state.members[number].proposal
        assert proposal is not None
        num_paid = 0 if proposal.probabilities else min(len(proposal), self.max_draft_tokens - size)
        promise = _promise([gains[number] for gains in history], best)
        return promise - max(self.token_cost * num_paid, _LEAST_WORTH_TOKENS)

    def _history(self, state: _State) -> list[Gains]:
        """The row's gains, preceded by those of other rows while it has few."""
        return [*(self._shared_gains if len(state.gains) < _KEPT_FORWARDS else ()), *state.gains]


def _gain(member: _Member, outcome: Outcome) -> int | None:
    if not member.proposal:
        return None
    nodes = member.proposal.nodes_along(outcome.token_ids)
    gain = len(nodes)
    if member.proposal.probabilities and gain == len(outcome.token_ids):
        # Every emitted token matches, and other drafts ended here: add what it expects beyond.
        gain += round(member.proposal.expected_below(nodes[-1]))
    # A proposal that was not drafted may have missed for that reason.
    is_known = member.is_drafted or bool(member.proposal.probabilities)
    return gain if gain or is_known else None


def _promise(gains: Sequence[int | None], had: Sequence[int]) -> float:
    """Tokens a member is expected to add to those of the others, in a forward in which it proposes.

    A running mean that starts high enough to give a member with few scores a chance.
    """
    promise = _FIRST_PROMISE_TOKENS
    for gain, best in zip(gains, had, strict=True):
        if gain is not None:
            promise += _RATE * (max(0, gain - best) - promise)
    return promise
