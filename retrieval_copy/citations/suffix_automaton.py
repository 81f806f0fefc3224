"""A suffix automaton: which parts of a sequence occur in other sequences, in linear time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence


class SuffixAutomaton:
    """Finds the longest substring ending at each position of a sequence that other sequences contain.

    Args:
        symbols: The sequence.
    """

    def __init__(self, symbols: Sequence[Hashable]) -> None:
        # Per state: transitions by symbol, suffix link, length of the longest string.
        self._next: list[dict[Hashable, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._ends: list[int] = []  # the state of each prefix of the sequence
        for symbol in symbols:
            self._extend(symbol)
        # Per state: length of the longest of its strings that was read, 0 if none.
        self._read = [0] * len(self._length)

    def _extend(self, symbol: Hashable) -> None:
        last = self._ends[-1] if self._ends else 0
        new = self._add({}, 0, self._length[last] + 1)
        state = last
        while state >= 0 and symbol not in self._next[state]:
            self._next[state][symbol] = new
            state = self._link[state]
        if state >= 0:
            target = self._next[state][symbol]
            if self._length[target] != self._length[state] + 1:
                copy = self._add(dict(self._next[target]), self._link[target], self._length[state] + 1)
                self._link[target] = copy
                while state >= 0 and self._next[state].get(symbol) == target:
                    self._next[state][symbol] = copy
                    state = self._link[state]
                target = copy
            self._link[new] = target
        self._ends.append(new)

    def _add(self, following: dict[Hashable, int], link: int, length: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        return len(self._length) - 1

    def read(self, symbols: Iterable[Hashable]) -> None:
        """Marks the substrings of the sequence that ``symbols`` contains, in one pass over ``symbols``."""
        following, link, length, read = self._next, self._link, self._length, self._read
        state = num_matching = 0
        for symbol in symbols:
            target = following[state].get(symbol)
            while target is None and state:
                state = link[state]
                num_matching = length[state]
                target = following[state].get(symbol)
            if target is not None:
                state = target
                num_matching += 1
                read[state] = max(read[state], num_matching)

    def shared_lengths(self) -> list[int]:
        """For each prefix of the sequence, the length of its longest suffix found in anything read."""
        by_length = sorted(range(1, len(self._length)), key=self._length.__getitem__)
        longest = list(self._read)
        for state in reversed(by_length):  # suffixes of a string that was read count as read
            link = self._link[state]
            if longest[state] and link:
                longest[link] = self._length[link]
        for state in by_length:
            longest[state] = longest[state] or longest[self._link[state]]
        return [longest[state] for state in self._ends]
