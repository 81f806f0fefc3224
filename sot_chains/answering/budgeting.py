"""Deciding by a budget what an answer may do, before each stage, and settling afterwards."""

from __future__ import annotations

from sot_chains.answering.requests import Plan, Requests
from sot_chains.calls.budget import Budget, BudgetAccount
from sot_chains.calls.model_call import Caller
from sot_chains.calls.options import SotOptions
from sot_chains.calls.usage import NO_TOKENS, Tokens, added, vocabulary
from sot_chains.text.skeleton import Skeleton

# For an estimate before there is an outline: six points are typical.
_TYPICAL = Skeleton.of(f"A heading of some words, the {number}th" for number in range(1, 7))


class BudgetPlanner:
    """The budget of one answer.

    Args:
        method: How answers are written.
        budget: The bound.
        caller: Estimates calls.
        requests: What they ask.
    """

    def __init__(self, method: SotOptions, budget: Budget, caller: Caller, requests: Requests) -> None:
        self._method = method
        self._caller = caller
        self._requests = requests
        self._purse = BudgetAccount(budget, method.price)
        self._degrades = budget.when_short == "degrade"
        self._reserved = NO_TOKENS

    async def allows_outline(self) -> bool:
        """Sets the outline aside, if it and points to follow can be afforded; ``False`` if not.

        Raises:
            BudgetError: They cannot, and the budget refuses.
        """
        await vocabulary()
        outline = self._caller.expected_tokens(self._requests.skeleton(prefill=False), "skeleton")
        skeleton = _TYPICAL.first(self._method.max_points)
        size = len(skeleton) if self._degrades else self._method.points_per_call
        whole = added(outline, self._expected(Plan(skeleton.points, size), skeleton))
        if not self._purse.reserve(whole):
            if self._degrades:
                return False
            raise self._purse.refuse("an outline and its points", whole)
        self._purse.correct(whole, outline)
        self._reserved = added(self._reserved, outline)
        return True

    def choose(self, plan: Plan, skeleton: Skeleton) -> Plan:
        """The first of ``plan`` and ever smaller ones that can be afforded; it is set aside.

        Raises:
            BudgetError: None can be, or the budget refuses smaller ones.
        """
        smaller = plan.smaller() if self._degrades and plan.points else []
        for candidate in [plan, *smaller]:
            expected = self._expected(candidate, skeleton)
            if self._purse.reserve(expected):
                self._reserved = added(self._reserved, expected)
                return candidate
        what = f"{len(plan.points)} points" if plan.points else "a plain answer"
        raise self._purse.refuse(what, self._expected(plan, skeleton))

    def settle(self, used: Tokens) -> None:
        """Replaces what was set aside by what was used."""
        self._purse.correct(self._reserved, used)
        self._reserved = used

    def _expected(self, plan: Plan, skeleton: Skeleton) -> Tokens:
        if not plan.points:
            return self._caller.expected_tokens(self._requests.plain(prefill=False), "plain")
        total = NO_TOKENS
        for points in plan.groups():
            messages = self._requests.points(skeleton, points, prefill=False)
            total = added(total, self._caller.expected_tokens(messages, "points", len(points)))
        return total
