"""The rows in use: who has which place in the cache, and what a new row can take over from others.

Rows that write come first and those whose prompt is being read behind them, so that a forward over
either is a forward over neighbours. Knows rows and the cache. Does not know the model or drafts.
"""

from __future__ import annotations

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.caching.prefix_cache import num_shared
from local_backend.requests.sequence import Row, State

# A row waits for another that is about to read this many more tokens of their common beginning.
_WORTH_WAITING_TOKENS = 16


class RunningBatch:
    """Rows side by side.

    Args:
        cache: Holds their keys and values, at the same places.
        max_rows: Rows at once, at most.
    """

    def __init__(self, cache: RaggedKVCache, max_rows: int) -> None:
        self._cache = cache
        self.max_rows = max_rows
        self._rows: list[Row] = []
        self._num_writing = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[Row]:
        """All rows, by place."""
        return list(self._rows)

    @property
    def writing(self) -> list[Row]:
        """The rows that write; their places begin at 0."""
        return self._rows[: self._num_writing]

    @property
    def prefilling(self) -> list[Row]:
        """The rows whose prompt is being read; their places begin behind those that write."""
        return self._rows[self._num_writing :]

    @property
    def num_free(self) -> int:
        """Places for further rows."""
        return self.max_rows - len(self._rows)

    @property
    def is_full(self) -> bool:
        """Whether there is no place for another row."""
        return self.num_free <= 0

    def add(self, row: Row) -> bool:
        """Give ``row`` a place, with the longest beginning that is there already.

        Returns:
            Whether it got one; not while another row is about to read what both begin with.
        """
        wanted = row.token_ids[:-1]
        source, num_ready = None, 0
        for place, other in enumerate(self._rows):
            shared = num_shared(wanted, other.token_ids)
            if other.state is State.PREFILLING:
                coming = min(shared, len(other.token_ids) - 1) - other.num_cached
                if coming >= _WORTH_WAITING_TOKENS:
                    return False
            if min(shared, other.num_cached) > num_ready:
                source, num_ready = place, min(shared, other.num_cached)
        prefix, num_kept = self._cache.find_prefix(wanted)
        place = self._cache.add_row()
        self._rows.append(row)
        row.state = State.PREFILLING
        if prefix is not None and num_kept > num_ready:
            self._cache.load_prefix(place, prefix, num_kept)
        elif source is not None:
            self._cache.copy_row(source, place, num_ready)
        row.num_cached = max(num_ready, num_kept)
        self.begin_writing()
        return True

    def begin_writing(self, most_unread: int = 0) -> None:
        """Let every row whose prompt is read but for so many tokens join those that write."""
        for row in self.prefilling:
            if row.num_to_prefill <= most_unread:
                place, target = self._rows.index(row), self._num_writing
                self._cache.swap_rows(place, target)
                self._rows[place], self._rows[target] = self._rows[target], row
                row.state = State.WRITING
                self._num_writing += 1

    def remove(self, row: Row, *, keep: bool = False) -> None:
        """Free a row's place.

        Args:
            row: One of the rows.
            keep: Whether later rows may begin with what it has read and written.
        """
        place = self._rows.index(row)
        if keep:
            self._cache.keep_prefix(place, row.token_ids)
        if place < self._num_writing:
            self._num_writing -= 1
            self._move(self._num_writing, place)
            place = self._num_writing
        self._move(len(self._rows) - 1, place)
        self._rows.pop()
        self._cache.remove_last_row()

    def preempt(self, row: Row) -> None:
        """Free the place of a row that is to go on later from what it has written.

        What it has read is kept while there is room for that, and otherwise read again.
        """
        self.remove(row, keep=True)
        row.state, row.num_cached = State.WAITING, 0

    def clear(self) -> list[Row]:
        """Free every place and forget every beginning; returns the rows there were."""
        rows, self._rows, self._num_writing = self._rows, [], 0
        self._cache.clear()
        return rows

    def _move(self, source: int, target: int) -> None:
        if source != target:
            self._cache.move_row(source, target)
            self._rows[target] = self._rows[source]
