"""The memory budget of rows: how many tokens fit in the KV cache.

The cache holds running rows side by side, all padded to the longest, so memory is counted in tokens: rows
times columns. Knows the model's cache and numbers. Does not know which rows wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.drafting.draft import EMPTY_DRAFT
from local_backend.kernels.openmp import run_in_short_lived_thread
from local_backend.models.architecture import Architecture
from local_backend.models.runner import ModelRunner
from local_backend.scheduling.lengths import Scheduling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Share of a limit that the prefix cache may take; running rows have priority.
_PREFIX_SHARE = 1 / 8
_DRAFT_TOKENS = 64  # a draft may extend past the model's last position, where it is rejected


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory for keys and values.

    Attributes:
        max_prefix_bytes: For the prefix cache.
        max_bytes: In total; ``None`` is no limit.
        bytes_per_token: Bytes of one token; 0 (not measured) without a limit.
        useful_tokens: The most tokens (rows times columns) that could ever be used.
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
        max_rows: int,
        max_prefix_bytes: int,
        scheduling: Scheduling,
    ) -> MemoryBudget:
        """Split the limit of ``scheduling``, measuring the bytes per token with one forward.

        On a GPU there always is one, a share of the free memory, so that the cache never has to grow.

        Raises:
            ValueError: The limit is too small for any row.
        """
        max_bytes = scheduling.max_cache_bytes
        if max_bytes is None and (free := free_gpu_bytes(architecture.device)) is not None:
            max_bytes = int(free * scheduling.gpu_memory_share)
        if max_bytes is None:
            return cls(max_prefix_bytes)
        cache = RaggedKVCache(architecture.num_layers, max_rows=1, max_prefix_bytes=0, max_tokens=1)
        cache.add_row()
        forward = ModelRunner(model, cache, architecture)
        run_in_short_lived_thread(lambda: forward(0, [[0]], [EMPTY_DRAFT], with_logits=False))
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
        """The most tokens (rows times columns) that fit; ``None`` without a limit."""
        if self.max_bytes is None:
            return None
        return min(self.useful_tokens, (self.max_bytes - self.max_prefix_bytes) // self.bytes_per_token)

    def require(self, num_tokens: int) -> None:
        """Raise ``ValueError`` unless a row of ``num_tokens`` tokens fits when it runs alone."""
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            needed, allowed = (number * self.bytes_per_token for number in (num_tokens, self.max_tokens))
            raise ValueError(
                f"a row of {num_tokens} tokens needs {needed} bytes of keys and values, but "
                f"max_cache_bytes={self.max_bytes} leaves {allowed} for rows: raise it, shorten the prompt "
                "or lower max_tokens"
            )


def free_gpu_bytes(device: torch.device) -> int | None:
    """Memory of a GPU that is not in use; ``None`` on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
