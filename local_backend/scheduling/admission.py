"""The order of admission: which waiting item is next, and when free slots are refilled.

Knows predicted lengths and the order of arrival. Does not know rows, memory or the clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from local_backend.scheduling.lengths import DEFAULT_MAX_OVERTAKES, AdmissionPolicy, Prediction

ItemT = TypeVar("ItemT")

# Lowest first. A row that starts late and turns out long is costly, so `longest_first` also starts rows early
# that may turn out long: it orders by a length as far above the maximum as that is above the expected one.
_RANKS: dict[AdmissionPolicy, Callable[[Prediction], float]] = {
    "first_come": lambda _: -math.inf,
    "shortest_first": lambda prediction: prediction.num_tokens,
    "longest_first": lambda prediction: prediction.num_tokens - 2 * prediction.max_num_tokens,
}
# While more items wait than slots are free, refill once this share of all slots is free, so that one forward
# prefills several prompts; but leave no slot free for more than this many forwards.
_REFILL_SHARE, _MAX_FREE_FORWARDS = 1 / 8, 8

_number: Callable[[Ticket], int] = attrgetter("number")


@dataclass(eq=False, slots=True)
class Ticket:
    """The place of an item in the order of arrival.

    Attributes:
        number: How many items arrived before it.
        num_arrived: How many had arrived when it had, those that arrived with it included.
        prediction: The predicted length of its answer; ``None`` if unknown.
    """

    number: int
    num_arrived: int
    prediction: Prediction | None = None


class AdmissionQueue(Generic[ItemT]):
    """Waiting items, in order of admission.

    Ties are admitted in order of arrival. Under ``shortest_first`` and ``longest_first``, items without a
    prediction come before all others, because nothing says that they should wait. No item starves: once
    ``max_overtakes`` later arrivals were admitted before an item, it is next whatever the policy. Items that
    arrived together do not count as overtaking each other.
    """

    def __init__(
        self, policy: AdmissionPolicy = "first_come", *, max_overtakes: int = DEFAULT_MAX_OVERTAKES
    ) -> None:
        self.policy, self.max_overtakes = policy, max_overtakes
        self._items: dict[Ticket, ItemT] = {}
        self._by_arrival: list[Ticket] = []
        self._by_policy: list[Ticket] = []
        self._num_arrived = self._num_gone = self._num_free_forwards = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[tuple[ItemT, Ticket]]:
        """The waiting items, in order of arrival."""
        return iter([(self._items[ticket], ticket) for ticket in self._by_arrival])

    def add(self, items: Iterable[tuple[ItemT, Prediction | None]]) -> None:
        """Queue items that arrived together behind earlier ones."""
        arrived = list(items)
        first, self._num_arrived = self._num_arrived, self._num_arrived + len(arrived)
        for number, (item, prediction) in enumerate(arrived, first):
            self._insert(item, Ticket(number, self._num_arrived, prediction))

    def pop(self) -> tuple[ItemT, Ticket]:
        """Remove and return the next item to admit.

        Raises:
            IndexError: The queue is empty.
        """
        first, chosen = self._by_arrival[0], self._by_policy[0]
        # Gone so far: earlier arrivals, those of its arrival that no longer wait, and its overtakers.
        num_beside = bisect_right(self._by_arrival, first.num_arrived - 1, key=_number)
        num_overtakes = self._num_gone - (first.num_arrived - num_beside)
        if num_overtakes >= self.max_overtakes and chosen.num_arrived > first.num_arrived:
            chosen = first
        return self.remove(chosen), chosen

    def put_back(self, item: ItemT, ticket: Ticket) -> None:
        """Undo :meth:`pop` for an item that was not admitted or was preempted: it gets its old place back."""
        self._num_gone -= 1
        self._insert(item, ticket)

    def remove(self, ticket: Ticket) -> ItemT:
        """Remove and return a waiting item."""
        del self._by_arrival[bisect_left(self._by_arrival, ticket.number, key=_number)]
        del self._by_policy[bisect_left(self._by_policy, self._rank(ticket), key=self._rank)]
        self._num_gone += 1
        return self._items.pop(ticket)

    def sort(self) -> None:
        """Sort the waiting items again, after the policy or predictions changed."""
        self._by_policy.sort(key=self._rank)

    def is_time(self, *, num_running: int, num_free: int) -> bool:
        """Whether to refill free slots now or wait for more of them; call once before each forward."""
        few = num_free < _REFILL_SHARE * (num_running + num_free)
        if few and num_running and num_free < len(self):
            self._num_free_forwards += 1
            if self._num_free_forwards <= _MAX_FREE_FORWARDS:
                return False
        self._num_free_forwards = 0
        return True

    def _insert(self, item: ItemT, ticket: Ticket) -> None:
        self._items[ticket] = item
        insort(self._by_arrival, ticket, key=_number)
        insort(self._by_policy, ticket, key=self._rank)

    def _rank(self, ticket: Ticket) -> tuple[float, int]:
        prediction = ticket.prediction
        return (-math.inf if prediction is None else _RANKS[self.policy](prediction), ticket.number)
