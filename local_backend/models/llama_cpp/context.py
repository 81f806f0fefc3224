"""llama.cpp's context: tokens of several sequences in, logits out, by the functions of ``llama-cpp-python``.

A sequence is a set of cells of one KV cache, each with a position. Cells may belong to several sequences, so
copying a sequence copies no keys and values. Knows llama.cpp's functions. Does not know rows or drafts.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_SEQUENCES = 256
"""Compiled into llama.cpp."""
MAX_EXACT_TOKENS = 31
"""Tokens of a forward that are sure to be computed as one alone is.

Compiled with a BLAS library, as on macOS, llama.cpp multiplies 32 tokens and more by weights that it has
converted to float32.
"""
_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_FLASH_ATTENTION = 1  # skips the cells of other sequences
# With keys and values of one type llama.cpp sums a single token's attention in parts, and that of several
# tokens in one go: answers with and without drafts would differ.
_TYPE_K, _TYPE_V = 1, 30  # GGML_TYPE_F16, GGML_TYPE_BF16
_log = logging.getLogger(__name__)
_BATCH_TOKENS, _MICRO_BATCH_TOKENS = 2048, 512


@cache
def llama_cpp() -> Any:
    """The module of ``llama-cpp-python``, with llama.cpp's messages going to the log of Python.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import llama_cpp as module
    except ImportError as error:
        raise ImportError(
            "runtime='llama.cpp' needs llama-cpp-python, which compiles llama.cpp for this machine: "
            "CMAKE_ARGS=-DGGML_OPENMP=OFF pip install llama-cpp-python"
        ) from error
    module.llama_log_set(_log_callback(module.llama_log_callback), ctypes.c_void_p(0))
    module.llama_backend_init()
    return module


@cache  # llama.cpp keeps no reference to it
def _log_callback(kind: Any) -> Any:
    def log(level: int, text: bytes, _: object) -> None:
        if level == _ERROR:
            _log.error("%s", text.decode(errors="replace").strip())

    return kind(log)


class LlamaContext:
    """One KV cache, and forwards over it. One thread at a time calls its methods.

    Args:
        model: llama.cpp's pointer to the model.
        num_cells: Tokens that fit in the KV cache, all sequences together.
        num_threads: Threads of a forward.

    Raises:
        MemoryError: The KV cache could not be allocated.
    """

    def __init__(self, model: Any, *, num_cells: int, num_threads: int) -> None:
        self._lib = llama_cpp()
        params = self._lib.llama_context_default_params()
        params.n_ctx = num_cells
        params.n_batch, params.n_ubatch = _BATCH_TOKENS, _MICRO_BATCH_TOKENS
        params.n_seq_max = MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = num_threads
        params.flash_attn_type = _FLASH_ATTENTION
        params.type_k, params.type_v = _TYPE_K, _TYPE_V
        params.kv_unified = True  # sequences share cells, so that copies are free
        params.swa_full = True  # layers with a sliding window keep what a rollback needs
        params.no_perf = True
        context = self._lib.llama_init_from_model(model, params)
        if not context:
            raise MemoryError(f"llama.cpp could not make a context of {num_cells} tokens")
        self._context = context
        self._memory = self._lib.llama_get_memory(context)
        self._num_token_ids = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(model))
        self._batch = _Batch(self._lib.llama_batch, _BATCH_TOKENS)
        self._views: dict[tuple[int, int], Tensor] = {}  # of the last forward's logits
        self._finalizer = weakref.finalize(self, self._lib.llama_free, context)

    def decode(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        is_wanted: Sequence[bool],
    ) -> Tensor:
        """Run one forward over new tokens, which are added to their sequences.

        Args:
            token_ids: The new tokens; of a sequence in ascending order.
            positions: The position of each.
            sequences: The sequence each belongs to.
            is_wanted: Whether its logits are wanted.

        Returns:
            Logits ``[wanted, vocabulary]``, overwritten by the next forward.

        Raises:
            RuntimeError: llama.cpp reports an error.
        """
        found = []
        for first in range(0, len(token_ids), _BATCH_TOKENS):
            part = slice(first, first + _BATCH_TOKENS)
            num_wanted = sum(is_wanted[part])
            batch = self._batch.filled(token_ids[part], positions[part], sequences[part], is_wanted[part])
            code = self._lib.llama_decode(self._context, batch)
            if code:
                raise RuntimeError(
                    f"llama.cpp could not decode {len(token_ids[part])} tokens: "
                    + ("its KV cache is full" if code == 1 else f"error {code}")
                )
            if num_wanted:
                found.append(self._logits(num_wanted))
                if len(token_ids) > _BATCH_TOKENS:
                    found[-1] = found[-1].clone()
        return torch.cat(found) if len(found) > 1 else found[0] if found else torch.empty(0)

    def _logits(self, count: int) -> Tensor:
        address = ctypes.addressof(self._lib.llama_get_logits(self._context).contents)
        if (count, address) not in self._views:
            scores = (ctypes.c_float * (count * self._num_token_ids)).from_address(address)
            self._views = {(count, address): torch.frombuffer(scores, dtype=torch.float32)}
        return self._views[count, address].view(count, self._num_token_ids)

    def copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """Add the tokens at positions ``start`` to ``end`` of one sequence to another; -1 is its end."""
        self._lib.llama_memory_seq_cp(self._memory, source, target, start, end)

    def remove(self, sequence: int, start: int = 0) -> None:
        """Remove the tokens of a sequence from position ``start`` on."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def clear(self) -> None:
        """Remove all tokens of all sequences."""
        self._lib.llama_memory_clear(self._memory, False)


class _Batch:
    """A ``llama_batch`` and the arrays that it points to, overwritten by each forward."""

    def __init__(self, kind: Any, size: int) -> None:
        self._token_ids = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._sequences = np.zeros(size, np.int32)
        self._is_wanted = np.zeros(size, np.int8)
        self._one_each = np.ones(size, np.int32)  # every token belongs to one sequence
        places = np.arange(size, dtype=np.uintp)
        self._pointers = self._sequences.ctypes.data + places * self._sequences.itemsize
        ints = ctypes.POINTER(ctypes.c_int32)
        self._batch = kind(
            n_tokens=0,
            token=self._token_ids.ctypes.data_as(ints),
            pos=self._positions.ctypes.data_as(ints),
            n_seq_id=self._one_each.ctypes.data_as(ints),
            seq_id=self._pointers.ctypes.data_as(ctypes.POINTER(ints)),
            logits=self._is_wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def filled(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        is_wanted: Sequence[bool],
    ) -> Any:
        """The batch with these tokens."""
        count = len(token_ids)
        self._token_ids[:count] = token_ids
        self._positions[:count] = positions
        self._is_wanted[:count] = is_wanted
        self._sequences[:count] = sequences
        self._batch.n_tokens = count
        return self._batch
