"""The order of admission: which of the waiting requests begins next.

Knows how long answers are expected to be and who came when. Does not know rows, the engine or the clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar, get_args

AdmissionPolicy = Literal["first_come", "shortest_first", "longest_first"]
"""``first_come``: as they arrive. ``shortest_first``: least mean latency. ``longest_first``: the whole is
done soonest, because no long answer is left to write alone at the end."""

ItemT = TypeVar("ItemT", bound=Hashable)

DEFAULT_MAX_OVERTAKES = 1024


@dataclass(slots=True)
class _Arrival:
    """Those that arrived together: how many had arrived up to the last of them, how many of them wait."""

    seconds: float
    num_arrived: int = 0
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class ArrivalRank:
    """A place in the order of arrival.

    Attributes:
        number: How many had arrived before.
        arrival: Shared by all that arrived at the same time.
    """

    number: int
    arrival: _Arrival = field(repr=False)


@dataclass(frozen=True, slots=True)
class QueueEntry(Generic[ItemT]):
    """One who waits.

    Attributes:
        item: What was added.
        predicted_tokens: The expected length of the answer; ``None`` is not known.
        ticket: Its place in the order of arrival.
    """

    item: ItemT
    predicted_tokens: float | None
    ticket: ArrivalRank


class WaitingQueue(Generic[ItemT]):
    """Who waits, in the order in which they begin.

    Among equals, and where no length is predicted, who came first begins first; under ``shortest_first`` and
    ``longest_first`` those without a prediction begin before the others, because nothing says they are the
    ones to wait. Nobody starves: at most ``max_overtakes`` that arrived later begin before a waiter, then it
    is its turn whatever the policy. Those that arrive at the same time do not overtake each other.

    Every operation is a search in, and a shift of, a sorted list: microseconds among 10,000 that wait.

    Args:
        policy: Who begins first.
        max_overtakes: How many that arrived later may begin before one that waits.

    Raises:
        ValueError: The policy is unknown or the limit is negative.
    """

    def __init__(
        self, policy: AdmissionPolicy = "first_come", *, max_overtakes: int = DEFAULT_MAX_OVERTAKES
    ) -> None:
        self.policy = _checked(policy)
        self.max_overtakes = _checked_limit(max_overtakes)
        self._waiters: dict[ItemT, QueueEntry[ItemT]] = {}
        self._by_policy: list[tuple[float, int, ItemT]] = []  # the second is unique: items are not compared
        self._by_arrival: list[tuple[int, ItemT]] = []
        self._num_arrived = 0
        self._num_gone = 0
        self._last_arrival: _Arrival | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[ItemT]:
        """Who waits, in order of arrival."""
        return (item for _, item in list(self._by_arrival))

    def __contains__(self, item: object) -> bool:
        return item in self._waiters

    def add(self, item: ItemT, *, predicted_tokens: float | None, now: float) -> None:
        """Let ``item`` wait behind those that came before it.

        Args:
            item: Equal to no other that waits.
            predicted_tokens: The expected length of its answer; ``None`` is not known.
            now: When it arrives, in seconds of any clock that does not run backwards.

        Raises:
            ValueError: It waits already.
        """
        if item in self._waiters:
            raise ValueError(f"{item!r} waits already: add each item once")
        if self._last_arrival is None or self._last_arrival.seconds != now:
            self._last_arrival = _Arrival(now)
        ticket = ArrivalRank(self._num_arrived, self._last_arrival)
        self._num_arrived += 1
        self._last_arrival.num_arrived = self._num_arrived
        self._insert(QueueEntry(item, predicted_tokens, ticket))

    def pop(self) -> QueueEntry[ItemT]:
        """Take out whoever begins next.

        Raises:
            IndexError: Nobody waits.
        """
        if not self._waiters:
            raise IndexError("nobody waits")
        first = self._waiters[self._by_arrival[0][1]]
        chosen = self._waiters[self._by_policy[0][2]]
        arrival = first.ticket.arrival
        if chosen.ticket.arrival is not arrival:
            # Gone are all that came before it, those that came with it and do not wait, and who overtook it.
            num_overtakes = self._num_gone - (arrival.num_arrived - arrival.num_waiting)
            if num_overtakes >= self.max_overtakes:
                chosen = first
        self.remove(chosen.item)
        return chosen

    def put_back(self, waiter: QueueEntry[ItemT]) -> None:
        """Undo :meth:`pop` for one that could not begin, or not end: it waits where it was.

        Its expected length may be another one now.

        Raises:
            ValueError: It waits already.
        """
        if waiter.item in self._waiters:
            raise ValueError(f"{waiter.item!r} waits already: put back what was popped, once")
        self._num_gone -= 1
        self._insert(waiter)

    def remove(self, item: ItemT) -> None:
        """Let ``item`` wait no longer.

        Raises:
            KeyError: It does not wait.
        """
        waiter = self._waiters.pop(item)
        waiter.ticket.arrival.num_waiting -= 1
        self._num_gone += 1
        del self._by_arrival[bisect_left(self._by_arrival, (waiter.ticket.number,))]
        del self._by_policy[bisect_left(self._by_policy, (self._rank(waiter), waiter.ticket.number))]

    def predict_again(self, predicted_tokens: Mapping[ItemT, float | None]) -> None:
        """Go by other expected lengths for these, of whom each waits."""
        for item, num_tokens in predicted_tokens.items():
            self._waiters[item] = replace(self._waiters[item], predicted_tokens=num_tokens)
        self._sort()

    def reorder(self, policy: AdmissionPolicy, *, max_overtakes: int) -> None:
        """Go on by another policy, those that wait already included."""
        self.policy = _checked(policy)
        self.max_overtakes = _checked_limit(max_overtakes)
        self._sort()

    def clear(self) -> list[ItemT]:
        """Let nobody wait; returns who did, in order of arrival."""
        left = list(self)
        for item in left:
            self.remove(item)
        return left

    def _insert(self, waiter: QueueEntry[ItemT]) -> None:
        self._waiters[waiter.item] = waiter
        waiter.ticket.arrival.num_waiting += 1
        insort(self._by_arrival, (waiter.ticket.number, waiter.item), key=lambda entry: entry[0])
        insort(
            self._by_policy,
            (self._rank(waiter), waiter.ticket.number, waiter.item),
            key=lambda entry: entry[:2],
        )

    def _sort(self) -> None:
        waiters = self._waiters.values()
        self._by_policy = sorted(
            ((self._rank(waiter), waiter.ticket.number, waiter.item) for waiter in waiters),
            key=lambda entry: entry[:2],
        )

    def _rank(self, waiter: QueueEntry[ItemT]) -> float:
        if self.policy == "first_come":
            return 0.0
        if waiter.predicted_tokens is None:
            return float("-inf")
        return waiter.predicted_tokens if self.policy == "shortest_first" else -waiter.predicted_tokens


def _checked(policy: AdmissionPolicy) -> AdmissionPolicy:
    if policy not in get_args(AdmissionPolicy):
        raise ValueError(f"no policy is named {policy!r}; there are {get_args(AdmissionPolicy)}")
    return policy


def _checked_limit(max_overtakes: int) -> int:
    if max_overtakes < 0:
        raise ValueError(f"max_overtakes must be 0 or more, got {max_overtakes}")
    return max_overtakes
