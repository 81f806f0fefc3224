"""Rows as sequences of a llama.cpp context, and the forward pass over them.

Every row is one sequence, and drafts are chains that follow its tokens. llama.cpp could verify trees, with a
sequence for each leaf, but their cells would no longer stand in the order of positions; attention sums over
cells in order, so a row's logits would no longer be bit for bit those of decoding without drafts.

Knows sequences, places and drafts. Does not know requests or how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from local_backend.caching.prefix_cache import Prefix, PrefixCache
from local_backend.drafting.draft import Draft
from local_backend.models.llama_cpp.context import MAX_EXACT_TOKENS, MAX_SEQUENCES, LlamaContext


@dataclass(slots=True)
class _Row:
    """A row.

    Attributes:
        sequence: Its sequence.
        length: Committed tokens.
    """

    sequence: int
    length: int = 0


class LlamaRows:
    """A :class:`~local_backend.caching.row_cache.RowCache` in a llama.cpp context.

    Args:
        context: Its sequences are used by nothing else.
        max_rows: Maximum number of rows in use at once.
        max_tokens: Maximum of rows times the longest row's tokens.
        bytes_per_token: Memory of one token's keys and values.
        max_prefix_bytes: Memory of the prefix cache; 0 disables it.
    """

    def __init__(
        self,
        context: LlamaContext,
        *,
        max_rows: int,
        max_tokens: int,
        bytes_per_token: int,
        max_prefix_bytes: int,
    ) -> None:
        self._context = context
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._bytes_per_token = bytes_per_token
        self._rows: list[_Row] = []
        self._free = list(range(MAX_SEQUENCES))
        self._prefixes = PrefixCache[int](max_prefix_bytes, self._release)
        self.expected_length = 0
        self.peak_bytes = 0

    @property
    def lengths(self) -> Sequence[int]:
        """Committed tokens of each row."""
        return [row.length for row in self._rows]

    def most_new_tokens(self, first_row: int, num_rows: int) -> int:
        """How many tokens a forward may append to each of ``num_rows`` rows from ``first_row``."""
        return self._max_tokens // len(self._rows) - max(self.lengths[first_row : first_row + num_rows])

    def add_row(self) -> int:
        """Add an empty row at the next place; returns the place.

        Raises:
            ValueError: All rows are in use.
        """
        if len(self._rows) == self._max_rows:
            raise ValueError(f"all {self._max_rows} rows are in use")
        self._rows.append(_Row(self._free.pop()))
        return len(self._rows) - 1

    def remove_last_row(self) -> None:
        """Remove the row at the last place."""
        self._release(self._rows.pop().sequence)

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Overwrite ``target`` with the first ``num_tokens`` tokens of ``source``."""
        self._fill(target, self._rows[source].sequence, num_tokens)

    def move_row(self, source: int, target: int) -> None:
        """Overwrite ``target`` with the row at ``source``, which is removed or overwritten next."""
        self.swap_rows(source, target)

    def swap_rows(self, one: int, other: int) -> None:
        """Exchange two rows."""
        self._rows[one], self._rows[other] = self._rows[other], self._rows[one]

    def assume_length(self, num_tokens: int) -> None:
        """Give every row ``num_tokens`` tokens, to time forwards after them."""
        first = self._rows[0]
        self._context.remove(first.sequence)
        zeros = [0] * num_tokens
        self._context.decode(zeros, range(num_tokens), [first.sequence] * num_tokens, [False] * num_tokens)
        first.length = num_tokens
        for place in range(1, len(self._rows)):
            self.copy_row(0, place, num_tokens)

    # Forwards ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        first_row: int,
        unread: Sequence[Sequence[int]],
        drafts: Sequence[Draft],
        *,
        with_logits: bool = True,
    ) -> Tensor | None:
        """A :class:`~local_backend.models.runner.Forward` for chains; commits nothing."""
        token_ids: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        is_wanted: list[bool] = []
        for row, tokens, draft in zip(self._rows[first_row:], unread, drafts, strict=False):
            # What the last forward added and was not committed goes first.
            self._context.remove(row.sequence, row.length)
            new = [*tokens, *draft.token_ids]
            token_ids += new
            positions += range(row.length, row.length + len(new))
            sequences += [row.sequence] * len(new)
            is_wanted += [False] * (len(tokens) - 1)
            is_wanted += [with_logits] * (1 + len(draft))
        # A row alone has the same logits with and without a draft: it is not read with what is drafted.
        num_draft_tokens = len(drafts[0]) if len(drafts) == 1 else 0
        ends = [len(token_ids)]
        if num_draft_tokens and len(token_ids) > MAX_EXACT_TOKENS:
            ends = [*range(len(token_ids) - num_draft_tokens, len(token_ids), MAX_EXACT_TOKENS), *ends]
        parts = []
        for start, end in pairwise([0, *ends]):
            part = slice(start, end)
            parts.append(
                self._context.decode(token_ids[part], positions[part], sequences[part], is_wanted[part])
            )
            if end < len(token_ids):
                parts[-1] = parts[-1].clone()  # the next part overwrites it
        if not with_logits:
            return None
        logits = torch.cat(parts) if len(parts) > 1 else parts[0]
        widths = [1 + len(draft) for draft in drafts]
        if min(widths) == max(widths):
            return logits.view(len(drafts), widths[0], -1)
        aligned = logits.new_zeros(len(drafts), max(widths), logits.shape[-1])
        for number, part in enumerate(logits.split(widths)):
            aligned[number, : len(part)] = part
        return aligned

    def commit(self, row: int, new_places: Sequence[int]) -> None:
        """Keep the tokens at ``new_places``, the first ones that the last forward appended to ``row``."""
        self._rows[row].length += len(new_places)
        self.peak_bytes = max(self.peak_bytes, self._num_bytes())

    # Prefixes ------------------------------------------------------------------------------------

    def keep_prefix(self, row: int, token_ids: Sequence[int]) -> None:
        """Keep ``row`` in the prefix cache, for later rows with the same prefix; shares its cells."""
        kept = self._rows[row]

        def copied() -> int:
            sequence = self._free.pop()
            self._context.remove(kept.sequence, kept.length)
            self._context.copy(kept.sequence, sequence)
            return sequence

        self._prefixes.keep(token_ids[: kept.length], self._bytes_per_token, copied)

    def find_prefix(self, token_ids: Sequence[int]) -> tuple[Prefix[int] | None, int]:
        """The cached prefix that shares the most first tokens with ``token_ids``, and how many it shares."""
        return self._prefixes.find(token_ids)

    def load_prefix(self, row: int, prefix: Prefix[int], num_tokens: int) -> None:
        """Overwrite ``row`` with the first ``num_tokens`` tokens of ``prefix``."""
        self._fill(row, prefix.states, num_tokens)

    def forget_prefixes(self) -> None:
        """Drop every cached prefix."""
        self._prefixes.clear()

    def clear(self) -> None:
        """Drop every row and prefix."""
        self._rows.clear()
        self._prefixes.clear()
        self._context.clear()
        self._free = list(range(MAX_SEQUENCES))

    def _fill(self, place: int, source: int, num_tokens: int) -> None:
        row = self._rows[place]
        self._context.remove(row.sequence)
        if num_tokens:
            self._context.copy(source, row.sequence, 0, num_tokens)
        row.length = num_tokens

    def _release(self, sequence: int) -> None:
        self._context.remove(sequence)
        self._free.append(sequence)

    def _num_bytes(self) -> int:
        return sum(row.length for row in self._rows) * self._bytes_per_token + self._prefixes.num_bytes
