"""One layer of the KV cache, with the interface ``transformers`` expects and rows of different lengths.

With :mod:`~local_backend.caching.kv_cache`, which holds one for each layer, the only module that touches
``transformers``' cache. Knows slots. Does not know rows or requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


@dataclass(slots=True)
class Slots:
    """Where the current forward writes and how many columns it attends to; shared by all layers."""

    num_rows: int
    num_columns: int
    max_tokens: int | None = None  # maximum of rows times columns
    first_row: int = 0
    width: int = 0
    shared_column: int | None = 0
    row_index: Tensor | None = None
    column_index: Tensor | None = None


@dataclass(slots=True)
class WrittenByIndex:
    """A layer as tensors alone, for compiled forwards: no shape but theirs says where is written.

    Attributes:
        keys: ``[rows, heads, columns, head size]``, all columns there is memory for; as ``values``.
        row_index: ``[rows, 1]``.
        column_index: ``[rows, new]``.
        mask: ``[..., columns that are attended to]``; ``None`` if those are the new ones.
    """

    keys: Tensor
    values: Tensor
    row_index: Tensor
    column_index: Tensor
    mask: Tensor | None

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`RowsLayer.update`."""
        self.keys[self.row_index, :, self.column_index] = key_states.transpose(1, 2)
        self.values[self.row_index, :, self.column_index] = value_states.transpose(1, 2)
        width = (self.column_index if self.mask is None else self.mask).shape[-1]
        return self.keys[:, :, :width], self.values[:, :, :width]


class RowsLayer(CacheLayerMixin):
    """One layer's keys and values, ``[rows, heads, columns, head size]``, with rows of different lengths."""

    is_sliding = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self._slots = slots
        self._stores: dict[str, Tensor] = {}  # flat; the buffers are views of them

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers, in the shape and dtype of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        slots = self._slots
        num_tokens = slots.max_tokens or slots.num_rows * slots.num_columns
        for name, states in (("keys", key_states), ("values", value_states)):
            _, heads, _, size = states.shape
            self._stores[name] = states.new_zeros(heads * size * num_tokens)
            setattr(self, name, self._view(name, heads, size))
        self.is_initialized = True

    def _view(self, name: str, heads: int, size: int) -> Tensor:
        shape = (self._slots.num_rows, heads, self._slots.num_columns, size)
        return self._stores[name][: math.prod(shape)].view(shape)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values to each row; returns what the forward attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self._slots
        num_rows, _, num_new, _ = key_states.shape
        rows = slice(slots.first_row, slots.first_row + num_rows)
        keys, values = (buffer[rows, :, : slots.width] for buffer in self.buffers)
        if slots.shared_column is not None:  # all rows equally long: one slice, no index
            keys.narrow(2, slots.shared_column, num_new).copy_(key_states)
            values.narrow(2, slots.shared_column, num_new).copy_(value_states)
        else:
            keys.transpose(1, 2)[slots.row_index, slots.column_index] = key_states.transpose(1, 2)
            values.transpose(1, 2)[slots.row_index, slots.column_index] = value_states.transpose(1, 2)
        return keys, values

    def by_index(self, like: Tensor, shape: tuple[int, int], mask: Tensor | None) -> WrittenByIndex:
        """The rows of the forward for one that writes by index; ``shape`` are heads and head size."""
        if not self.is_initialized:
            empty = like.new_empty(1, shape[0], 0, shape[1])
            self.lazy_initialization(empty, empty)
        slots: Any = self._slots
        rows = slice(slots.first_row, slots.first_row + len(slots.row_index))
        keys, values = (buffer[rows] for buffer in self.buffers)
        indices = (slots.row_index.to(self.device), slots.column_index.to(self.device))
        return WrittenByIndex(keys, values, *indices, mask)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that the forward attends to, and where they begin."""
        return self._slots.width, 0

    def get_seq_length(self) -> int:
        """Columns that the forward attends to, since the rows have no common length."""
        return self._slots.width

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values, in bytes."""
        return sum(store.nbytes for store in self._stores.values())

    @property
    def buffers(self) -> list[Tensor]:
        """Keys and values; none before the first forward."""
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]

    def bytes_per_token(self) -> int:
        """Memory of one token, in bytes."""
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in self.buffers)

    def release(self) -> None:
        """Free the buffers; the next forward allocates new ones."""
        self._stores.clear()
        self.keys = self.values = None
        self.is_initialized = False

    def lay_out(self, lengths: Sequence[int]) -> int:
        """Reshape the buffers to the current numbers of rows and columns, keeping each row's tokens.

        Returns:
            Temporary memory in bytes, beyond the buffers afterwards.
        """
        if not self.is_initialized:
            return 0
        passing = 0
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            _, heads, columns, size = old.shape
            num_elements = self._slots.num_rows * self._slots.num_columns * heads * size
            grows = num_elements > self._stores[name].numel()
            if grows:
                passing = max(passing, self._stores[name].nbytes)
                self._stores[name] = old.new_zeros(num_elements)
            new = self._view(name, heads, size)
            # In place, wider rows move away from the first and narrower ones towards it: use the order
            # in which no row is overwritten before it has moved.
            wider = new.shape[2] > columns
            if new.shape[2] == columns and not grows:
                setattr(self, name, new)
                continue
            for row in reversed(range(len(lengths))) if wider else range(len(lengths)):
                kept = old[row, :, : lengths[row]]
                if not grows:
                    kept = kept.clone()
                    passing = max(passing, kept.nbytes)
                new[row, :, : lengths[row]] = kept
            setattr(self, name, new)
        return passing


def explained(error: Exception, about: str) -> Exception:
    """``error``; if it is a lack of memory, one that says ``about`` what it was and what needs less."""
    is_shortage = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    if not is_shortage or error.__cause__ is not None:
        return error
    better = torch.OutOfMemoryError(f"there is not enough memory for {about} ({error})")
    better.__cause__ = error
    return better
