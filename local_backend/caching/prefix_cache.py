"""Prefix cache: keys and values of earlier rows, so that a row with the same prefix skips its prefill.

Knows token ids and their keys and values. Does not know where rows are stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

LayerTensors = list[list[Tensor]]
"""Keys and values per layer, each ``[heads, tokens, head size]``."""
# Limits short prefixes, too, because every new row is compared with all of them.
MAX_PREFIXES = 64


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached keys and values of an earlier row, and the tokens they belong to."""

    token_ids: tuple[int, ...]
    states: LayerTensors


class PrefixCache:
    """Prefixes of earlier rows; the least recently used are dropped first.

    Args:
        max_bytes: Memory of all prefixes; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.kept: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()  # the least recently used first
        self._num_tokens = 0
        self._bytes_per_token = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all prefixes, in bytes."""
        return self._num_tokens * self._bytes_per_token

    def keep(self, token_ids: Sequence[int], bytes_per_token: int, copy: Callable[[], LayerTensors]) -> None:
        """Store a prefix, which ``copy`` copies, unless it is too large; drops others to make room.

        ``bytes_per_token`` is the memory of one token's keys and values, in all layers.
        """
        key = tuple(token_ids)
        self._bytes_per_token = bytes_per_token
        if not 0 < len(key) * bytes_per_token <= self._max_bytes:
            return
        if key in self.kept:
            self.kept.move_to_end(key)
            return
        most_tokens = self._max_bytes // bytes_per_token - len(key)
        while self._num_tokens > most_tokens or len(self.kept) >= MAX_PREFIXES:
            self._num_tokens -= len(self.kept.popitem(last=False)[0])
        self.kept[key] = Prefix(key, copy())
        self._num_tokens += len(key)

    def find(self, token_ids: Sequence[int]) -> tuple[Prefix | None, int]:
        """The prefix that shares the most first tokens with ``token_ids``, and how many it shares."""
        best, best_shared = None, 0
        wanted = tuple(token_ids)
        for prefix in self.kept.values():
            # One comparison skips those that share no more than the best so far.
            if prefix.token_ids[: best_shared + 1] == wanted[: best_shared + 1]:
                shared = num_shared(prefix.token_ids, wanted)
                if shared > best_shared:
                    best, best_shared = prefix, shared
        if best is not None:
            self.kept.move_to_end(best.token_ids)
        return best, best_shared

    def clear(self) -> None:
        """Drop all prefixes."""
        self.kept.clear()
        self._num_tokens = 0


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two sequences; bisected, because slices compare at C speed."""
    low, high = 0, min(len(one), len(other))
    one, other = tuple(one[:high]), tuple(other[:high])
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
