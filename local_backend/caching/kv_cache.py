"""KV cache of the rows in use; with ``cache_layer``, the only module that touches ``transformers``' cache.

Every row has its own length. The rows of a forward are adjacent in one buffer per layer, so a forward needs
no gathering. A row's new tokens are written after its length, and a commit keeps the accepted ones by
advancing that length. All rows have as many columns as the longest needs, so memory is rows times columns.
If that is limited, as it is on a GPU, the buffers are allocated in full at first use and never move; rows
that need more columns than there are for every row get them, and fewer rows fit.

Knows slots and lengths. Does not know drafts, sampling or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Cache

from local_backend.caching.cache_layer import RowsLayer, Slots, explained
from local_backend.caching.prefix_cache import LayerTensors, Prefix, PrefixCache

_FIRST_ROWS, _FIRST_COLUMNS = 4, 256
_NO_LIMIT = 2**31


class RaggedKVCache(Cache):
    """A ``transformers`` cache in which every row has its own length.

    Args:
        num_layers: Decoder layers of the model.
        max_rows: Maximum number of rows in use at once.
        max_prefix_bytes: Memory of the prefix cache; 0 disables it.
        max_tokens: Maximum of rows times columns; ``None`` for no limit.

    Attributes:
        expected_length: Expected final length in tokens of the longest row in use: a hint, not a limit.
        peak_bytes: Peak memory of keys and values so far, including temporary copies.
        row_layers: Those of the model, in order.
        prefixes: Those of earlier rows; :meth:`keep_prefix` and :meth:`load_prefix` copy from and to a row.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        max_rows: int,
        max_prefix_bytes: int = 256 * 2**20,
        max_tokens: int | None = None,
    ) -> None:
        if max_tokens is None:
            self._slots = Slots(min(_FIRST_ROWS, max_rows), _FIRST_COLUMNS)
        else:
            columns = max(1, max_tokens // max_rows)
            self._slots = Slots(min(max_rows, max_tokens // columns), columns, max_tokens)
        self._max_rows = max_rows
        self.row_layers = [RowsLayer(self._slots) for _ in range(num_layers)]
        super().__init__(layers=list(self.row_layers))
        self._lengths: list[int] = []
        self.prefixes = PrefixCache(max_prefix_bytes)
        self.expected_length = 0
        self.peak_bytes = 0
        self._num_moves = 0

    @property
    def lengths(self) -> Sequence[int]:
        """Committed tokens of each row in use; their slots are 0, 1, 2, ..."""
        return self._lengths

    # Memory --------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values in bytes, including the prefix cache."""
        return sum(layer.num_bytes for layer in self.row_layers) + self.prefixes.num_bytes

    def bytes_per_token(self) -> int:
        """Memory of one token's keys and values in all layers; 0 before the first forward."""
        return sum(layer.bytes_per_token() for layer in self.row_layers)

    def fits(self, num_rows: int, num_columns: int) -> bool:
        """Whether there is memory for ``num_rows`` rows of ``num_columns`` tokens."""
        max_tokens = self._slots.max_tokens
        return max_tokens is None or num_rows * num_columns <= max_tokens

    def most_new_tokens(self, first_row: int, num_rows: int) -> int:
        """How many tokens a forward may append to each of ``num_rows`` rows from ``first_row``."""
        if self._slots.max_tokens is None:
            return _NO_LIMIT
        longest = max(self._lengths[first_row : first_row + num_rows])
        return self._slots.max_tokens // len(self._lengths) - longest

    def _make_room(self, num_rows: int, num_columns: int) -> None:
        """Grow the buffers to at least this many rows and columns."""
        slots = self._slots
        if num_rows <= slots.num_rows and num_columns <= slots.num_columns:
            return
        if slots.max_tokens is None:
            while slots.num_rows < num_rows:
                slots.num_rows = min(self._max_rows, 2 * slots.num_rows)
            while slots.num_columns < num_columns:
                slots.num_columns *= 2
        else:
            num_columns = max([num_columns, *self._lengths])
            if not self.fits(num_rows, num_columns):
                few = f"the {slots.max_tokens} tokens there is memory for"
                raise ValueError(f"{num_rows} rows of {num_columns} tokens are more than {few}")
            if num_columns > slots.num_columns or not self.fits(num_rows, slots.num_columns):
                widest = slots.max_tokens // num_rows
                most = slots.max_tokens // self._max_rows  # wider than that costs rows
                slots.num_columns = min(widest, max(num_columns, self.expected_length, most))
            slots.num_rows = min(self._max_rows, slots.max_tokens // slots.num_columns)
        self._num_moves += slots.max_tokens is None
        try:
            passing = max(layer.lay_out(self._lengths) for layer in self.row_layers)
        except RuntimeError as error:
            size = slots.num_rows * slots.num_columns * self.bytes_per_token() / 2**30
            told = explained(
                error,
                f"{size:.2f} GiB of keys and values, {slots.num_rows} rows of {slots.num_columns} tokens: "
                "lower max_rows or max_tokens, or set Scheduling(max_cache_bytes=...)",
            )
            for layer in self.row_layers:  # some have grown
                layer.release()
            self._num_moves += 1
            slots.num_rows = slots.num_columns = 1
            raise told from told.__cause__
        self._note_peak(passing)

    def _note_peak(self, passing: int = 0) -> None:
        self.peak_bytes = max(self.peak_bytes, self.num_bytes + passing)

    # Rows ----------------------------------------------------------------------------------------

    def add_row(self) -> int:
        """Add an empty row at the next slot; returns the slot.

        Raises:
            ValueError: All rows are in use.
        """
        if len(self._lengths) == self._max_rows:
            raise ValueError(f"all {self._max_rows} rows are in use")
        self._make_room(len(self._lengths) + 1, 1)
        self._lengths.append(0)
        return len(self._lengths) - 1

    def remove_last_row(self) -> None:
        """Remove the row at the last slot."""
        self._lengths.pop()

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Overwrite ``target`` with the first ``num_tokens`` tokens of ``source``."""
        for layer in self.row_layers:
            for buffer in layer.buffers:
                buffer[target, :, :num_tokens] = buffer[source, :, :num_tokens]
        self._lengths[target] = num_tokens

    def swap_rows(self, one: int, other: int) -> None:
        """Exchange two rows."""
        if one == other:
            return
        both = max(self._lengths[one], self._lengths[other])
        for layer in self.row_layers:
            for buffer in layer.buffers:
                kept = buffer[one, :, :both].clone()
                self._note_peak(kept.nbytes)
                buffer[one, :, :both] = buffer[other, :, :both]
                buffer[other, :, :both] = kept
        self._lengths[one], self._lengths[other] = self._lengths[other], self._lengths[one]

    # Forwards ------------------------------------------------------------------------------------

    def begin_forward(self, first_row: int, num_rows: int, num_new: int, *, indexed: bool = False) -> int:
        """Make room to append ``num_new`` to each of ``num_rows`` rows from ``first_row``.

        Returns:
            Columns the forward attends to: the longest row's length plus the new tokens.
        """
        lengths = self._lengths[first_row : first_row + num_rows]
        width = max(lengths) + num_new
        self._make_room(len(self._lengths), width)
        self._note_peak()
        slots = self._slots
        slots.first_row, slots.width = first_row, width
        if min(lengths) == max(lengths) and not indexed:
            slots.shared_column = lengths[0]
        else:
            # Indices on another device than the buffers would be copied, and waited for, in every layer.
            device = self.row_layers[0].device if self.row_layers[0].is_initialized else None
            columns = torch.tensor(lengths)[:, None] + torch.arange(num_new)
            self.write_at(torch.arange(num_rows, device=device)[:, None], columns.to(device))
        return width

    def begin_padded_forward(self, num_rows: int, num_new_tokens: int, column_step: int) -> list[int]:
        """Make room for a forward of the first rows, in a shape that many forwards share.

        Rows are padded to a power of two and columns to multiples of ``column_step``, or of larger steps if
        there are more. :meth:`write_at` sets where to write; padding rows are written after their tokens.

        Returns:
            Committed tokens of each row, padding rows included.
        """
        self._make_room(len(self._lengths), 1)
        num_padded = min(1 << (num_rows - 1).bit_length(), self._slots.num_rows)
        lengths = self._lengths[:num_padded]
        lengths += [0] * (num_padded - len(lengths))
        width = max(lengths) + num_new_tokens
        step = max(column_step, 1 << max(0, width.bit_length() - 3))  # at most a quarter of padding
        widest = max(lengths) + self.most_new_tokens(0, len(self._lengths))
        width = min(-(-width // step) * step, widest)
        self._make_room(len(self._lengths), width)
        self._note_peak()
        self._slots.first_row, self._slots.width = 0, width
        return lengths

    def write_at(self, row_index: torch.Tensor, column_index: torch.Tensor) -> None:
        """Write the forward's keys and values to ``[rows, 1]`` rows and ``[rows, new]`` columns."""
        slots = self._slots
        slots.shared_column, slots.row_index, slots.column_index = None, row_index, column_index

    @property
    def num_attended(self) -> int:
        """Columns that the current forward attends to."""
        return self._slots.width

    @property
    def layout(self) -> tuple[int, int, int]:
        """A number that changes whenever the buffers move, and their rows and columns."""
        return self._num_moves, self._slots.num_rows, self._slots.num_columns

    def assume_length(self, num_tokens: int) -> None:
        """Pretend that every row has ``num_tokens`` cached tokens, to time forwards after them."""
        self._make_room(len(self._lengths), num_tokens)
        self._lengths = [num_tokens] * len(self._lengths)

    def commit(self, row: int, new_columns: Sequence[int]) -> None:
        """Keep the tokens at ``new_columns`` among those the last forward appended to the slot ``row``.

        These are ascending indexes, 0 for the first; the next forward overwrites the other tokens.
        """
        length = self._lengths[row]
        if any(column != kept for kept, column in enumerate(new_columns)):
            source = torch.tensor(new_columns, device=self.row_layers[0].device) + length
            end = length + len(new_columns)
            for layer in self.row_layers:
                for buffer in layer.buffers:
                    buffer[row, :, length:end] = buffer[row, :, source.to(buffer.device)]
        self._lengths[row] = length + len(new_columns)

    # Prefixes ------------------------------------------------------------------------------------

    def keep_prefix(self, row: int, token_ids: Sequence[int]) -> None:
        """Copy ``row`` to the prefix cache, for later rows with the same prefix."""
        length = self._lengths[row]

        def copied() -> LayerTensors:
            return [
                [buffer[row, :, :length].clone() for buffer in layer.buffers] for layer in self.row_layers
            ]

        self.prefixes.keep(token_ids[:length], self.bytes_per_token(), copied)
        self._note_peak()

    def load_prefix(self, row: int, prefix: Prefix, num_tokens: int) -> None:
        """Overwrite ``row`` with the first ``num_tokens`` tokens of ``prefix``."""
        self._make_room(len(self._lengths), num_tokens)
        for layer, kept in zip(self.row_layers, prefix.states, strict=True):
            for buffer, states in zip(layer.buffers, kept, strict=True):
                buffer[row, :, :num_tokens] = states[:, :num_tokens]
        self._lengths[row] = num_tokens

    def clear(self) -> None:
        """Drop every row and prefix."""
        self._lengths.clear()
        self.prefixes.clear()
