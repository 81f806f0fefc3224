"""The running rows: their slots in the cache, and which prefix a new row can reuse.

Decoding rows have the first slots and prefilling rows the slots after them, so that a forward over
either covers adjacent slots. Knows rows and the cache. Does not know the model or drafts.
"""

from __future__ import annotations

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.caching.prefix_cache import num_shared
from local_backend.sequences.sequence import Row, State

# A row is postponed while another has at least this many tokens of their shared prefix left to prefill.
_WORTH_WAITING_TOKENS = 16


class RunningBatch:
    """The running rows, in adjacent slots; ``cache`` holds their keys and values in the same slots."""

    def __init__(self, cache: RaggedKVCache, max_rows: int) -> None:
        self._cache = cache
        self.max_rows = max_rows
        self._rows: list[Row] = []
        self._num_writing = 0
        self._compared: list[Row] = []
        self._num_shared = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[Row]:
        """All rows, in slot order."""
        return list(self._rows)

    @property
    def writing(self) -> list[Row]:
        """The decoding rows; their slots start at 0."""
        return self._rows[: self._num_writing]

    @property
    def num_shared(self) -> int:
        """First tokens that all decoding rows had in common, and cached, when the last of them joined."""
        if (rows := self.writing) != self._compared:
            shared = min((num_shared(rows[0].token_ids, row.token_ids) for row in rows[1:]), default=0)
            self._num_shared = min([shared, *(row.num_cached for row in rows)])
            self._compared = rows
        return self._num_shared

    @property
    def prefilling(self) -> list[Row]:
        """The prefilling rows; their slots follow those of the decoding rows."""
        return self._rows[self._num_writing :]

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return self.max_rows - len(self._rows)

    def add(self, row: Row) -> bool:
        """Give ``row`` a slot, filled with the longest prefix already in the cache.

        Returns whether it got one: not while another row is about to prefill a prefix they share.
        """
        wanted = row.token_ids[:-1]
        source, num_ready = None, 0
        for slot, other in enumerate(self._rows):
            shared = num_shared(wanted, other.token_ids)
            if other.state is State.PREFILLING:
                coming = min(shared, len(other.token_ids) - 1) - other.num_cached
                if coming >= _WORTH_WAITING_TOKENS:
                    return False
            if min(shared, other.num_cached) > num_ready:
                source, num_ready = slot, min(shared, other.num_cached)
        prefix, num_kept = self._cache.prefixes.find(wanted)
        slot = self._cache.add_row()
        self._rows.append(row)
        row.state = State.PREFILLING
        if prefix is not None and num_kept > num_ready:
            self._cache.load_prefix(slot, prefix, num_kept)
        elif source is not None:
            self._cache.copy_row(source, slot, num_ready)
        row.num_cached = max(num_ready, num_kept)
        self.begin_writing()
        return True

    def begin_writing(self, most_unread: int = 0) -> None:
        """Start decoding every row with at most ``most_unread`` tokens left to prefill."""
        for row in self.prefilling:
            if row.num_to_prefill <= most_unread:
                slot, target = self._rows.index(row), self._num_writing
                self._cache.swap_rows(slot, target)
                self._rows[slot], self._rows[target] = self._rows[target], row
                row.state = State.WRITING
                self._num_writing += 1

    def remove(self, row: Row, *, keep: bool = False) -> None:
        """Free a row's slot; ``keep`` keeps its prompt and answer in the prefix cache."""
        slot = self._rows.index(row)
        if keep:
            self._cache.keep_prefix(slot, row.token_ids)
        if slot < self._num_writing:
            self._num_writing -= 1
            self._move(self._num_writing, slot)
            slot = self._num_writing
        self._move(len(self._rows) - 1, slot)
        self._rows.pop()
        self._compared = []  # which nothing may keep alive
        self._cache.remove_last_row()

    def preempt(self, row: Row) -> None:
        """Free the slot of a row that will resume later with the tokens it has.

        Its keys and values stay in the prefix cache if there is room; otherwise they are computed again.
        """
        self.remove(row, keep=True)
        row.state, row.num_cached = State.WAITING, 0

    def clear(self) -> list[Row]:
        """Free every slot and empty the prefix cache; returns the rows removed."""
        rows, self._rows, self._compared, self._num_writing = self._rows, [], [], 0
        self._cache.clear()
        return rows

    def _move(self, source: int, target: int) -> None:
        if source != target:
            self._cache.copy_row(source, target, self._cache.lengths[source])
            self._rows[target] = self._rows[source]
