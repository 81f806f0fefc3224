"""Indexes texts of any size by the tokens before each position, to find where a row's last tokens occur.

The positions are sorted by their token, the one before it, and so on backwards, as in a suffix array of
the reversed text (Manber and Myers, 1990). All positions where the last n tokens of a row occur are then
adjacent, those with the longest matches innermost. Finding them takes one binary search per token of
context, at most :data:`MAX_MATCH_TOKENS`, whatever the size of the texts. The index keeps no state per
row, so any number of rows can query it at once.

Built by sorting with numpy: more than a million tokens a second. Takes eight bytes per token.

Knows token ids only. Does not know when or how much to copy.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

MAX_MATCH_TOKENS = 32
"""How far back a match is followed; longer ones count as this long."""

BORDER = -1
"""Separates two texts; no token has this id, so no match and no copy crosses it."""

_KEY_BITS = 62
# If more positions than wanted have equally long matches, only this many are examined per range.
_MAX_LOOKED_AT = 4096
_NUM_COMMON_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Match:
    """Where the last ``num_tokens`` tokens of a row occurred; a copy would begin at ``index``, behind."""

    index: int
    num_tokens: int


class SuffixIndex:
    """Finds every position in several texts where a row's last tokens occur.

    Raises:
        ValueError: A token id is negative.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        sizes = [len(text) for text in texts]
        tokens = np.full(sum(sizes) + len(sizes) + 1, BORDER, dtype=np.int32)
        self.starts = []
        index = 1  # after a border, so that following a match backwards always ends at one
        for text, size in zip(texts, sizes, strict=True):
            self.starts.append(index)
            tokens[index : index + size] = np.fromiter(text, np.int32, size)
            index += size + 1
        if int((tokens < 0).sum()) != len(sizes) + 1:
            raise ValueError(f"token ids are 0 or more, got {int(tokens.min())}")
        self._order_array = _sorted_by_context(tokens)
        self._token_array = tokens
        # Items of a memoryview are plain integers, and much faster to read than numpy's.
        self.tokens: memoryview[int] = memoryview(cast("Any", tokens))
        self._order: memoryview[int] = memoryview(cast("Any", self._order_array))
        firsts = tokens[self._order_array]
        known, begins = np.unique(firsts, return_index=True)
        ends = np.append(begins[1:], len(firsts))
        self._ranges = dict(
            zip(known.tolist(), zip(begins.tolist(), ends.tolist(), strict=True), strict=True)
        )
        self._ranges.pop(BORDER)

    def __len__(self) -> int:
        return len(self.tokens) - len(self.starts) - 1

    def count(self, token: int) -> int:
        """How often a token occurs."""
        first, end = self._ranges.get(token, (0, 0))
        return int(end - first)

    @cached_property
    def _commonest(self) -> list[NDArray[np.int32]]:
        """The positions of each of the commonest tokens, ascending."""
        tokens = sorted(self._ranges, key=lambda token: (-self.count(token), token))[:_NUM_COMMON_TOKENS]
        return [np.sort(self._order_array[slice(*self._ranges[token])]) for token in tokens]

    def common_tokens(self, *, behind: int) -> Iterator[tuple[int, int]]:
        """Count of each of the commonest tokens, and its first index from ``behind`` on, else its first."""
        for indexes in self._commonest:
            rank = int(indexes.searchsorted(behind))
            yield len(indexes), int(indexes[rank if rank < len(indexes) else 0])

    def matches(self, text: Sequence[int], *, limit: int, near: int = 0) -> list[Match]:
        """Indexes where the end of ``text`` occurs and another token follows, longest matches first.

        Of too many equally long matches, those closest to ``near`` are taken.
        """
        found: list[Match] = []
        inner_first = inner_end = 0
        for num_tokens, first, end in reversed(list(self._narrowing(text))):
            # Indexes in the inner, narrower range were already taken, with their longer match.
            if num_tokens == MAX_MATCH_TOKENS or inner_first == inner_end:
                ranges = [(first, end)]
            else:
                ranges = [(first, inner_first), (inner_end, end)]
            inner_first, inner_end = first, end
            indexes = self._followed(ranges, limit - len(found), near)
            found.extend(Match(index, num_tokens) for index in indexes)
            if len(found) == limit:
                break
        return found

    def longest(self, text: Sequence[int], *, near: int = 0) -> Match | None:
        """The longest match; of equally long ones, the closest to ``near``."""
        return next(iter(self.matches(text, limit=1, near=near)), None)

    def _narrowing(self, text: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Match length and range of the order, for longer and longer ends of ``text``."""
        if not text or text[-1] not in self._ranges:
            return
        first, end = self._ranges[text[-1]]
        yield 1, first, end
        tokens, order = self.tokens, self._order
        for num_before in range(1, min(len(text), MAX_MATCH_TOKENS)):
            wanted = text[-1 - num_before]

            def before(index: int, num_before: int = num_before) -> int:
                return tokens[index - num_before]

            if end - first == 1:
                if before(order[first]) != wanted:
                    return
            else:
                first = bisect_left(order, wanted, first, end, key=before)
                end = bisect_right(order, wanted, first, end, key=before)
                if first == end:
                    return
            yield num_before + 1, first, end

    def _followed(self, ranges: Sequence[tuple[int, int]], limit: int, near: int) -> list[int]:
        """The positions after those in ``ranges`` of the order, ascending, unless a text ends there."""
        tokens, order = self.tokens, self._order
        size = sum(end - first for first, end in ranges)
        if size <= 2 * limit:
            indexes = [
                order[rank] + 1
                for rank in chain.from_iterable(range(first, end) for first, end in ranges)
                if tokens[order[rank] + 1] != BORDER
            ]
            indexes.sort()
            if len(indexes) > limit:
                indexes = sorted(sorted(indexes, key=lambda index: abs(index - near))[:limit])
            return indexes
        some = np.concatenate([self._order_array[first:end][:_MAX_LOOKED_AT] for first, end in ranges]) + 1
        some = some[self._token_array[some] != BORDER]
        if len(some) > limit:
            some = some[np.argpartition(np.abs(some - near), limit - 1)[:limit]]
        return sorted(some.tolist())


def _sorted_by_context(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Indexes sorted by the tokens at and before them, as far back as matches are followed.

    As many tokens as fit are packed into one number; then each pass doubles the length of the sorted
    context (prefix doubling).
    """
    shifted = tokens.astype(np.int64) + 1  # borders are 0
    bits = max(1, int(shifted.max()).bit_length())
    context = min(MAX_MATCH_TOKENS, _KEY_BITS // bits)
    keys = np.zeros_like(shifted)
    for back in range(min(context, len(tokens))):
        keys[back:] |= shifted[: len(shifted) - back] << (bits * (context - 1 - back))
    order = np.argsort(keys)
    while context < MAX_MATCH_TOKENS:
        in_order = keys[order]
        ranks = np.empty_like(keys)
        ranks[order] = np.concatenate(([0], np.cumsum(in_order[1:] != in_order[:-1])))
        num_ranks = int(ranks.max()) + 1
        if num_ranks == len(tokens):
            break
        keys = ranks * (num_ranks + 1)
        keys[context:] += ranks[: max(0, len(ranks) - context)] + 1
        order = np.argsort(keys)
        context *= 2
    return order.astype(np.int32)


_KEPT_INDEXES = 32  # per token


class GrowingIndex:
    """Index of a growing text."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._indexes: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_KEPT_INDEXES))
        self._lengths: dict[int, int] = {}  # of the match that ends at a position

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append emitted tokens."""
        for token in token_ids:
            before = self._lengths
            self._lengths = {index: before.get(index - 1, 0) + 1 for index in self._indexes.get(token, ())}
            self._indexes[token].append(len(self.tokens))
            self.tokens.append(token)

    def matches(self, *, limit: int) -> list[Match]:
        """Earlier positions where the end of the text occurs, longest matches first, then the latest."""
        found = [Match(index + 1, num_tokens) for index, num_tokens in self._lengths.items()]
        found.sort(key=lambda match: (-match.num_tokens, -match.index))
        return found[:limit]


_NOTHING = SuffixIndex([])


class SharedIndexes:
    """Indexes shared by rows, built at first use; the least recently used are dropped first.

    At most ``max_tokens`` tokens stay indexed, but one set of references always does.
    """

    def __init__(self, max_tokens: int = 4_000_000) -> None:
        self._max_tokens = max_tokens
        # By identity: equal texts are one object. Keeping the texts prevents reuse of their ids.
        self._kept: OrderedDict[int, tuple[Sequence[Sequence[int]], SuffixIndex]] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, references: Sequence[Sequence[int]]) -> SuffixIndex:
        """The index of ``references``."""
        if not references:
            return _NOTHING
        key = id(references)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        index = SuffixIndex(references)
        self._kept[key] = references, index
        self._num_tokens += len(index)
        while self._num_tokens > self._max_tokens and len(self._kept) > 1:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._num_tokens -= len(dropped)
        return index
