"""Keys and values of the rows in use: the only module that touches ``transformers``' cache.

Every row has a length of its own. The rows of a forward lie side by side in one buffer per layer, so a
forward over them needs no gathering; a row's new tokens are written behind its own length, and a commit keeps
the accepted ones by moving that length. What a row leaves behind when it ends is kept for a while, so
that a later row with the same beginning need not compute it again.

Knows places, lengths and token ids. Does not know drafts, sampling or requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

_FIRST_COLUMNS = 256
# However short they are: every row that comes is compared with all of them.
_MAX_PREFIXES = 64


class _RowsLayer(CacheLayerMixin):
    """One layer's keys and values, ``[rows, heads, columns, head size]``, rows of different lengths."""

    is_sliding = False

    def __init__(self, places: _Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self._places = places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        rows, columns = self._places.num_rows, self._places.num_columns
        self.keys = key_states.new_zeros(rows, key_states.shape[1], columns, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], columns, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        places = self._places
        first, last = places.first_row, places.first_row + key_states.shape[0]
        keys = self.keys[first:last, :, : places.width]
        values = self.values[first:last, :, : places.width]
        if places.shared_column is not None:  # all rows equally long: one slice, no index
            end = places.shared_column + key_states.shape[2]
            keys[:, :, places.shared_column : end] = key_states
            values[:, :, places.shared_column : end] = value_states
        else:
            keys.transpose(1, 2)[places.row_index, places.column_index] = key_states.transpose(1, 2)
            values.transpose(1, 2)[places.row_index, places.column_index] = value_states.transpose(1, 2)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._places.width, 0

    def get_seq_length(self) -> int:
        return self._places.width

    def get_max_length(self) -> int:
        return -1

    def resize(self, rows: int, columns: int) -> None:
        """Grow the buffers, keeping what they hold."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)


@dataclass(slots=True)
class _Places:
    """Where the forward under way writes and how far it looks; shared by all layers."""

    num_rows: int
    num_columns: int = _FIRST_COLUMNS
    first_row: int = 0
    width: int = 0
    shared_column: int | None = 0
    row_index: Tensor | None = None
    column_index: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and values a finished row left behind.

    Attributes:
        token_ids: The tokens they belong to.
        layers: Keys and values per layer, each ``[heads, tokens, head size]``.
    """

    token_ids: tuple[int, ...]
    layers: list[tuple[Tensor, Tensor]]


class RowsCache(Cache):
    """A ``transformers`` cache in which every row has its own length.

    Args:
        num_layers: Decoder layers of the model.
        max_rows: Rows in use at once, at most.
        max_prefix_bytes: Memory for what finished rows leave behind, in all; 0 keeps nothing.
    """

    def __init__(self, num_layers: int, *, max_rows: int, max_prefix_bytes: int = 256 * 2**20) -> None:
        self._places = _Places(num_rows=min(4, max_rows))
        self._max_rows = max_rows
        self._max_prefix_bytes = max_prefix_bytes
        self._row_layers = [_RowsLayer(self._places) for _ in range(num_layers)]
        super().__init__(layers=list(self._row_layers))
        self._lengths: list[int] = []
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()

    @property
    def num_rows(self) -> int:
        """Rows in use; their places are 0 to ``num_rows - 1``."""
        return len(self._lengths)

    @property
    def lengths(self) -> Sequence[int]:
        """Committed tokens of each row."""
        return self._lengths

    # Rows come and go ----------------------------------------------------------------------------

    def add_row(self) -> int:
        """Take the next place for an empty row; returns the place.

        Raises:
            ValueError: All places are taken.
        """
        if len(self._lengths) == self._max_rows:
            raise ValueError(f"all {self._max_rows} rows are in use")
        self._lengths.append(0)
        if len(self._lengths) > self._places.num_rows:
            self._places.num_rows = min(self._max_rows, 2 * self._places.num_rows)
            self._resize()
        return len(self._lengths) - 1

    def remove_last_row(self) -> None:
        """Give the last place back."""
        self._lengths.pop()

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Let ``target`` begin with the first ``num_tokens`` tokens of ``source``."""
        for layer in self._row_layers:
            if layer.is_initialized:
                assert layer.keys is not None
                assert layer.values is not None
                layer.keys[target, :, :num_tokens] = layer.keys[source, :, :num_tokens]
                layer.values[target, :, :num_tokens] = layer.values[source, :, :num_tokens]
        self._lengths[target] = num_tokens

    def move_row(self, source: int, target: int) -> None:
        """Put the row at ``source`` into ``target``, which is overwritten."""
        if source != target:
            self.copy_row(source, target, self._lengths[source])

    def swap_rows(self, one: int, other: int) -> None:
        """Exchange two rows."""
        if one == other:
            return
        both = max(self._lengths[one], self._lengths[other])
        for layer in self._row_layers:
            for buffer in (layer.keys, layer.values):
                if buffer is not None:
                    kept = buffer[one, :, :both].clone()
                    buffer[one, :, :both] = buffer[other, :, :both]
                    buffer[other, :, :both] = kept
        self._lengths[one], self._lengths[other] = self._lengths[other], self._lengths[one]

    # Forwards ------------------------------------------------------------------------------------

    def begin_forward(self, first_row: int, num_rows: int, num_new_tokens: int) -> int:
        """Make room for ``num_new_tokens`` behind each of ``num_rows`` rows from ``first_row``.

        Returns:
            Columns the forward attends to: the longest row's length and the new tokens.
        """
        lengths = self._lengths[first_row : first_row + num_rows]
        width = max(lengths) + num_new_tokens
        places = self._places
        if width > places.num_columns:
            while places.num_columns < width:
                places.num_columns *= 2
            self._resize()
        places.first_row, places.width = first_row, width
        if min(lengths) == max(lengths):
            places.shared_column = lengths[0]
        else:
            places.shared_column = None
            places.row_index = torch.arange(num_rows)[:, None]
            places.column_index = torch.tensor(lengths)[:, None] + torch.arange(num_new_tokens)
        return width

    def assume_length(self, num_tokens: int) -> None:
        """Let every row hold ``num_tokens`` tokens of no meaning, to time forwards behind them."""
        while self._places.num_columns < num_tokens:
            self._places.num_columns *= 2
            self._resize()
        self._lengths = [num_tokens] * len(self._lengths)

    def commit(self, row: int, new_places: Sequence[int]) -> None:
        """Keep, of the tokens the last forward wrote behind ``row``, those at ``new_places``, in this order.

        What is not kept is overwritten by the next forward.

        Args:
            row: The row's place.
            new_places: Ascending places among the new tokens, 0 for the first.
        """
        length = self._lengths[row]
        if any(place != kept for kept, place in enumerate(new_places)):
            source = torch.tensor(new_places) + length
            end = length + len(new_places)
            for layer in self._row_layers:
                for buffer in (layer.keys, layer.values):
                    assert buffer is not None
                    buffer[row, :, length:end] = buffer[row, :, source.to(buffer.device)]
        self._lengths[row] = length + len(new_places)

    def _resize(self) -> None:
        for layer in self._row_layers:
            layer.resize(self._places.num_rows, self._places.num_columns)

    # Prefixes ------------------------------------------------------------------------------------

    def keep_prefix(self, row: int, token_ids: Sequence[int]) -> None:
        """Remember what ``row`` holds, so that a later row may begin with it."""
        length = self._lengths[row]
        if not 0 < length * self._bytes_per_token() <= self._max_prefix_bytes:
            return
        key = tuple(token_ids[:length])
        if key in self._prefixes:
            self._prefixes.move_to_end(key)
            return
        layers = []
        for layer in self._row_layers:
            assert layer.keys is not None
            assert layer.values is not None
            layers.append((layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone()))
        self._prefixes[key] = Prefix(key, layers)
        num_tokens = sum(map(len, self._prefixes))
        while (
            num_tokens * self._bytes_per_token() > self._max_prefix_bytes
            or len(self._prefixes) > _MAX_PREFIXES
        ):
            dropped, _ = self._prefixes.popitem(last=False)
            num_tokens -= len(dropped)

    def _bytes_per_token(self) -> int:
        buffers = [b for layer in self._row_layers for b in (layer.keys, layer.values) if b is not None]
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in buffers)

    def find_prefix(self, token_ids: Sequence[int]) -> tuple[Prefix | None, int]:
        """The kept prefix that shares most first tokens with ``token_ids``, and how many it shares."""
        best, best_shared = None, 0
        for prefix in self._prefixes.values():
            shared = num_shared(prefix.token_ids, token_ids)
            if shared > best_shared:
                best, best_shared = prefix, shared
        if best is not None:
            self._prefixes.move_to_end(best.token_ids)
        return best, best_shared

    def load_prefix(self, row: int, prefix: Prefix, num_tokens: int) -> None:
        """Let ``row`` begin with the first ``num_tokens`` tokens of ``prefix``."""
        while self._places.num_columns < num_tokens:
            self._places.num_columns *= 2
            self._resize()
        for layer, (keys, values) in zip(self._row_layers, prefix.layers, strict=True):
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys[row, :, :num_tokens] = keys[:, :num_tokens]
            layer.values[row, :, :num_tokens] = values[:, :num_tokens]
        self._lengths[row] = num_tokens

    def forget_prefixes(self) -> None:
        """Drop every kept prefix."""
        self._prefixes.clear()

    def clear(self) -> None:
        """Drop every row and prefix."""
        self._lengths.clear()
        self._prefixes.clear()


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two sequences share; halving, because slices compare at C speed."""
    low, high = 0, min(len(one), len(other))
    one, other = tuple(one[:high]), tuple(other[:high])
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
