"""The memory of rows: what fits, and what is asked for at a time.

Keys and values of the rows in use lie side by side, all as long as the longest, so memory is counted in
tokens: rows times columns. Knows the model's cache and numbers. Does not know who waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.drafting.draft import EMPTY_DRAFT
from local_backend.models.architecture import Architecture
from local_backend.models.model_runner import ModelRunner, run_in_short_lived_thread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of a limit, what kept beginnings may take: rows that write come first.
_PREFIX_SHARE = 1 / 8
_DRAFT_TOKENS = 64  # a draft may reach beyond the model's last position; it is refused there


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory for keys and values.

    Attributes:
        max_prefix_bytes: For what finished rows leave behind.
        max_bytes: For everything; ``None`` is no limit.
        bytes_per_token: What one token takes; unknown, 0, where there is no limit.
        useful_tokens: Rows times columns beyond which memory would never be used.
    """

    max_prefix_bytes: int
    max_bytes: int | None = None
    bytes_per_token: int = 0
    useful_tokens: int = 2**62

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        architecture: Architecture,
        *,
        max_rows: int,
        max_prefix_bytes: int,
        max_bytes: int | None,
    ) -> MemoryBudget:
        """Divide a limit, by what the model itself writes for one token.

        Args:
            model: In evaluation mode, with the type and device it will have.
            architecture: What is known of it.
            max_rows: Rows at once, at most.
            max_prefix_bytes: For kept beginnings, at most.
            max_bytes: For everything.

        Raises:
            ValueError: There is not room for one token.
        """
        if max_bytes is None:
            return cls(max_prefix_bytes)
        cache = RaggedKVCache(architecture.num_layers, max_rows=1, max_prefix_bytes=0, max_tokens=1)
        cache.add_row()
        forward = ModelRunner(model, cache, architecture)

        def read_one() -> None:
            forward(0, [[0]], [EMPTY_DRAFT], with_logits=False)

        run_in_short_lived_thread(read_one)
        memory = cls(
            min(max_prefix_bytes, int(max_bytes * _PREFIX_SHARE)),
            max_bytes,
            cache.bytes_per_token(),
            max_rows * (architecture.max_positions + _DRAFT_TOKENS),
        )
        memory.require(2)
        return memory

    @property
    def max_tokens(self) -> int | None:
        """Rows times columns, at most."""
        if self.max_bytes is None:
            return None
        return min(self.useful_tokens, (self.max_bytes - self.max_prefix_bytes) // self.bytes_per_token)

    def require(self, num_tokens: int) -> None:
        """Check that a row of so many tokens fits, if it is alone.

        Raises:
            ValueError: It does not.
        """
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            needed, allowed = (number * self.bytes_per_token for number in (num_tokens, self.max_tokens))
            raise ValueError(
                f"a row of {num_tokens} tokens needs {needed} bytes of keys and values, but of "
                f"max_cache_bytes={self.max_bytes} rows may take {allowed}: allow more, shorten the prompt "
                "or lower max_tokens"
            )
