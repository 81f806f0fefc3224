"""How much answers may cost. Each call is checked against the budget before it is sent."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal

from sot_chains.calls.usage import Price, Tokens
from sot_chains.providers.base import ProviderError

_lock = threading.Lock()  # of all budgets, since a lock of its own could be neither copied nor pickled


class BudgetError(ProviderError):
    """A call would cost more than the budget has left; nothing was sent for it."""


@dataclass
class Budget:
    """A bound on what answers cost.

    A call is sent only if the budget has room for its estimated tokens; its usage then replaces the estimate.
    An answer whose points do not all fit has those that do, in order, and is marked in the trace as partial;
    if not even the skeleton or a single point fits, :class:`BudgetError` is raised. Copies of a chain spend
    from the same budget; a pickled one has what is left, and spends for itself.

    Attributes:
        tokens: Tokens, read and written together.
        price: Money, in the currency of the table of prices.
        scope: Whether each answer may spend it (``"answer"``), or all together (``"total"``).

    Raises:
        ValueError: There is no bound, or one is not positive.
    """

    tokens: int | None = None
    price: float | None = None
    scope: Literal["answer", "total"] = "answer"
    _spent_tokens: int = field(default=0, init=False, repr=False)
    _spent_price: float = field(default=0.0, init=False, repr=False)

    def __deepcopy__(self, memo: object) -> Budget:
        return self

    def __post_init__(self) -> None:
        if self.tokens is None and self.price is None:
            raise ValueError("a budget needs a bound: tokens=... or price=...")
        for name, value in (("tokens", self.tokens), ("price", self.price)):
            if value is not None and value <= 0:
                raise ValueError(f"the budget's {name} must be positive, got {value}")
        if self.scope not in ("answer", "total"):
            raise ValueError(f'scope is "answer" or "total", got {self.scope!r}')


class BudgetAccount:
    """What one answer may still spend of a budget.

    Answers that share a budget reserve before they spend, so that together they keep to it.

    Args:
        budget: The bound.
        price: The model's price; must be known for a budget in money.
    """

    def __init__(self, budget: Budget, price: Price | None) -> None:
        self.budget = budget
        self._price = price
        self._tokens = 0
        self._money = 0.0

    def reserve(self, expected: Tokens, what: str) -> None:
        """Reserves ``expected`` for the call named ``what``.

        Raises:
            BudgetError: The budget has less left.
        """
        tokens, money = self._of(expected)
        with _lock:
            spent_tokens, spent_money = self._spent()
            lacking = []
            if self.budget.tokens is not None and spent_tokens + tokens > self.budget.tokens:
                lacking.append(f"about {tokens} tokens with {self.budget.tokens - spent_tokens} left")
            if self.budget.price is not None and spent_money + money > self.budget.price:
                lacking.append(f"about {money:.6f} with {self.budget.price - spent_money:.6f} left")
            if lacking:
                raise BudgetError(
                    f"the budget is too small for {what}: {' and '.join(lacking)}; nothing was sent for it"
                )
            self._add(tokens, money)

    def correct(self, expected: Tokens, used: Tokens) -> None:
        """Replaces what was reserved by what was used."""
        tokens, money = self._of(used)
        expected_tokens, expected_money = self._of(expected)
        with _lock:
            self._add(tokens - expected_tokens, money - expected_money)

    def _of(self, tokens: Tokens) -> tuple[int, float]:
        price = self._price.of(tokens) if self._price else 0.0
        return tokens["input_tokens"] + tokens["output_tokens"], price

    def _spent(self) -> tuple[int, float]:
        if self.budget.scope == "total":
            return self.budget._spent_tokens, self.budget._spent_price
        return self._tokens, self._money

    def _add(self, tokens: int, money: float) -> None:
        self._tokens += tokens
        self._money += money
        self.budget._spent_tokens += tokens
        self.budget._spent_price += money
