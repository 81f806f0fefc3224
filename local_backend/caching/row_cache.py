"""What the engine needs of a KV cache, whoever computes the forward.

Knows places, lengths and token ids. Does not know how keys and values are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from local_backend.caching.prefix_cache import Prefix


class RowCache(Protocol):
    """Keys and values of rows, each with its own length; the rows in use have the places from 0 on.

    Attributes:
        expected_length: Expected final length in tokens of the longest row in use: a hint, not a limit.
        peak_bytes: Peak memory of keys and values so far.
    """

    expected_length: int
    peak_bytes: int

    @property
    def lengths(self) -> Sequence[int]:
        """Committed tokens of each row."""

    def most_new_tokens(self, first_row: int, num_rows: int) -> int:
        """How many tokens a forward may append to each of ``num_rows`` rows from ``first_row``."""

    def add_row(self) -> int:
        """Add an empty row at the next place; returns the place."""

    def remove_last_row(self) -> None:
        """Remove the row at the last place."""

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Overwrite ``target`` with the first ``num_tokens`` tokens of ``source``."""

    def move_row(self, source: int, target: int) -> None:
        """Overwrite ``target`` with the row at ``source``, which is removed or overwritten next."""

    def swap_rows(self, one: int, other: int) -> None:
        """Exchange two rows."""

    def commit(self, row: int, new_places: Sequence[int]) -> None:
        """Keep the tokens at ``new_places``, ascending, among those the last forward appended to ``row``."""

    def keep_prefix(self, row: int, token_ids: Sequence[int]) -> None:
        """Copy ``row`` to the prefix cache, for later rows with the same prefix."""

    def find_prefix(self, token_ids: Sequence[int]) -> tuple[Prefix[Any] | None, int]:
        """The cached prefix that shares the most first tokens with ``token_ids``, and how many it shares."""

    def load_prefix(self, row: int, prefix: Prefix[Any], num_tokens: int) -> None:
        """Overwrite ``row`` with the first ``num_tokens`` tokens of ``prefix``."""

    def forget_prefixes(self) -> None:
        """Drop every cached prefix."""

    def clear(self) -> None:
        """Drop every row and prefix."""

    def assume_length(self, num_tokens: int) -> None:
        """Pretend that every row has ``num_tokens`` cached tokens, to time forwards after them."""
