"""The indexes of references, one for all rows that pass the same.

Knows token ids only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from local_backend.drafters.text_index import TextIndex

_NOTHING = TextIndex([])


class SharedIndexes:
    """Indexes, made when first asked for; those used longest ago are dropped first.

    Args:
        max_tokens: Tokens indexed, in all; one set of references is always kept.
    """

    def __init__(self, max_tokens: int = 4_000_000) -> None:
        self._max_tokens = max_tokens
        # By identity, which equal texts share. The texts are kept, too, or others could take theirs over.
        self._kept: OrderedDict[int, tuple[Sequence[Sequence[int]], TextIndex]] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, references: Sequence[Sequence[int]]) -> TextIndex:
        """The index of ``references``."""
        if not references:
            return _NOTHING
        key = id(references)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        index = TextIndex(references)
        self._kept[key] = references, index
        self._num_tokens += len(index)
        while self._num_tokens > self._max_tokens and len(self._kept) > 1:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._num_tokens -= len(dropped)
        return index
