"""A GGUF file whose forwards llama.cpp computes, on a CPU, with the weights as the file has them.

Its 4-bit kernels read a quarter of what bfloat16 needs, so that plain decoding is several times as fast as
with ``transformers`` on a CPU without units for bfloat16. Needs ``llama-cpp-python`` (extra ``llama-cpp``),
which compiles llama.cpp for this machine when it is installed. Configuration, tokenizer and chat template are
read from the file by ``transformers``.

Knows the file and what an engine needs of it. Does not know the engine.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from local_backend.caching.prefix_cache import MAX_PREFIXES
from local_backend.kernels.prepacking import free_bytes
from local_backend.models.forward_cost import ForwardCost, ForwardTimer
from local_backend.models.gguf import gguf_parts
from local_backend.models.known_costs import known_cost, processor
from local_backend.models.llama_cpp.context import MAX_SEQUENCES, LlamaContext, llama_cpp
from local_backend.models.llama_cpp.rows import LlamaRows

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_USUAL_BYTES = 512 * 2**20
_DRAFT_TOKENS = 64  # a draft may extend past what is kept
_TIMED_POSITIONS = 256
_BYTES_OF_NUMBER = 2  # keys are float16, values bfloat16


@dataclass(frozen=True, slots=True)
class ReadyRows:
    """Rows in a context of a model.

    Attributes:
        rows: Their KV cache, which has the forward pass.
        max_positions: Maximum tokens of a row.
        max_tokens: Tokens that fit, all rows together.
        num_bytes: Memory for keys and values in all.
        max_prefix_bytes: Part of it for the prefix cache.
        bytes_per_token: Memory of one token's keys and values.
    """

    rows: LlamaRows
    max_positions: int
    max_tokens: int
    num_bytes: int
    max_prefix_bytes: int
    bytes_per_token: int


class LlamaCppModel:
    """A model in llama.cpp.

    Args:
        path: The GGUF file.
        config: Its configuration.
        num_threads: Threads of a forward; by default those of torch.

    Attributes:
        description: A ``transformers`` model of this configuration, without weights.

    Raises:
        ImportError: ``llama-cpp-python`` is not installed.
        ValueError: llama.cpp cannot read the file, or its layers keep a state that cannot be rolled back.
    """

    def __init__(self, path: Path, config: PretrainedConfig, *, num_threads: int | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self._lib = llama_cpp()
        with torch.device("meta"):
            self.description: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        self.description.name_or_path = str(path)
        self._path = path
        self._num_threads = num_threads or torch.get_num_threads()
        self._model = self._lib.llama_model_load_from_file(
            str(path).encode(), self._lib.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"llama.cpp cannot read {path}: is the file whole, and its architecture known?")
        weakref.finalize(self, self._lib.llama_model_free, self._model)
        if self._lib.llama_model_is_recurrent(self._model) or self._lib.llama_model_is_hybrid(self._model):
            raise ValueError(
                f"{path} has recurrent layers, whose state cannot be rolled back when a draft is refused: "
                "use llama.cpp itself for it"
            )

    def ready(self, *, max_rows: int, max_prefix_bytes: int, max_bytes: int | None = None) -> ReadyRows:
        """Make a context and rows in it.

        Args:
            max_rows: Maximum number of rows in use at once.
            max_prefix_bytes: Maximum for the prefix cache.
            max_bytes: For keys and values; by default 512 MiB, or as much as the longest row takes, up to a
                quarter of the free memory.

        Raises:
            ValueError: ``max_bytes`` is too small for any row, or ``max_rows`` is too large.
        """
        if max_rows > MAX_SEQUENCES - MAX_PREFIXES:
            raise ValueError(f"llama.cpp takes at most {MAX_SEQUENCES - MAX_PREFIXES} rows, got {max_rows}")
        bytes_per_token = self._bytes_per_token()
        positions = self._lib.llama_model_n_ctx_train(self._model)
        if max_bytes is None:
            # A model of 128,000 positions would take many GB for a row that nobody writes.
            longest_row = min(positions * bytes_per_token, free_bytes() // 4)
            num_bytes = max(_USUAL_BYTES, longest_row) + max_prefix_bytes
        else:
            num_bytes = max_bytes
        max_prefix_bytes = min(max_prefix_bytes, num_bytes // 3)
        max_tokens = (num_bytes - max_prefix_bytes) // bytes_per_token
        if max_tokens < 2:
            raise ValueError(f"max_cache_bytes={max_bytes} is too little: a token takes {bytes_per_token}")
        context = LlamaContext(
            self._model,
            num_cells=num_bytes // bytes_per_token + _DRAFT_TOKENS * max_rows,
            num_threads=self._num_threads,
        )
        weakref.finalize(context, _keep_alive, self)  # llama.cpp frees a context before its model
        rows = LlamaRows(
            context,
            max_rows=max_rows,
            max_tokens=max_tokens,
            bytes_per_token=bytes_per_token,
            max_prefix_bytes=max_prefix_bytes,
        )
        return ReadyRows(
            rows,
            max_positions=min(positions, max_tokens),
            max_tokens=max_tokens,
            num_bytes=num_bytes,
            max_prefix_bytes=max_prefix_bytes,
            bytes_per_token=bytes_per_token,
        )

    def measured_costs(self) -> ForwardCost:
        """The cost of forwards by width, measured once on this machine for each file."""
        key = {
            "processor": processor(torch.device("cpu")),
            "llama.cpp": self._lib.__version__,
            "compiled for": self._lib.llama_print_system_info().decode(),
            "threads of llama.cpp": self._num_threads,
            "file": self._path.name,
            "size": self._path.stat().st_size,
        }
        return known_cost(key, self._timer, is_kept=True)

    def _timer(self, *, max_rows: int) -> ForwardTimer:
        ready = self.ready(
            max_rows=max_rows,
            max_prefix_bytes=0,
            max_bytes=max_rows * _TIMED_POSITIONS * self._bytes_per_token(),
        )
        # A longer context would have to be read first, which takes seconds.
        positions = min(_TIMED_POSITIONS, ready.max_positions)
        return ForwardTimer(ready.rows.forward, ready.rows, max_rows=max_rows, max_positions=positions)

    def _bytes_per_token(self) -> int:
        config = self.description.config.get_text_config(decoder=True)
        heads = self._lib.llama_model_n_head_kv(self._model)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(self._lib.llama_model_n_layer(self._model) * heads * size * 2 * _BYTES_OF_NUMBER)


def _keep_alive(_: LlamaCppModel) -> None:
    """Hold a reference until a finalizer runs."""


def load_llama_cpp(
    path: Path, *, num_threads: int | None = None, described_by: Path | None = None
) -> tuple[LlamaCppModel, PreTrainedTokenizerBase]:
    """Read a GGUF file with llama.cpp, and its tokenizer and configuration with ``transformers``.

    Args:
        path: The file.
        num_threads: Threads of a forward; by default those of torch.
        described_by: A folder with the same model's tokenizer and configuration, which is faster to read.

    Raises:
        ImportError: ``llama-cpp-python`` is not installed.
        ValueError: llama.cpp or ``transformers`` cannot read the file.
    """
    config, generation_config, tokenizer = gguf_parts(path, described_by)
    model = LlamaCppModel(path, config, num_threads=num_threads)
    model.description.generation_config = generation_config
    return model, tokenizer
