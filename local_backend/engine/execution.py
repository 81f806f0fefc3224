"""A model made ready to decode rows: its forward pass, the KV cache, limits and costs.

The one place that tells the two ways to compute a forward apart: ``transformers`` models, and GGUF files that
llama.cpp computes with. Knows models and memory. Does not know requests, drafts or the decoding loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.caching.row_cache import RowCache
from local_backend.kernels.graphs import check_graphs
from local_backend.kernels.grouped_attention import read_in_place
from local_backend.kernels.openmp import run_in_short_lived_thread
from local_backend.kernels.prepacking import prepack, repack
from local_backend.models.architecture import Architecture
from local_backend.models.compatibility import verify_compatibility
from local_backend.models.forward_cost import ForwardCost
from local_backend.models.known_costs import known_forward_cost
from local_backend.models.llama_cpp.model import LlamaCppModel
from local_backend.models.runner import Forward, ModelRunner
from local_backend.scheduling.memory_budget import MemoryBudget

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Execution:
    """How an engine computes.

    Attributes:
        model: Has the configuration; the weights, too, unless llama.cpp has them.
        device: Of logits.
        forward: Computes the logits of rows in ``cache``.
        cache: The KV cache.
        memory: The memory budget of rows.
        max_positions: Maximum tokens of prompt and answer together.
        keeps_logits: Whether the logits of a forward's last tokens can be computed alone.
        takes_trees: Whether drafts may branch.
        measured_costs: Measures or recalls the cost of forwards by width.
        repack: Renews what was computed from the weights, after they changed.
    """

    model: PreTrainedModel
    device: torch.device
    forward: Forward
    cache: RowCache
    memory: MemoryBudget
    max_positions: int
    keeps_logits: bool
    takes_trees: bool
    measured_costs: Callable[[], ForwardCost]
    repack: Callable[[], object]


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """Arguments of the same names of :class:`~local_backend.engine.engine.Engine`."""

    max_rows: int
    max_prefix_bytes: int
    max_cache_bytes: int | None
    grouped_attention_in_place: bool
    cuda_graphs: bool
    prepacked: bool | None


def execution_of(model: PreTrainedModel | LlamaCppModel, options: ExecutionOptions) -> Execution:
    """Check a model and make it ready.

    Raises:
        ValueError: The memory is too small for any row, the model cannot be decoded losslessly in a batch, or
            an option is not for it.
    """
    if isinstance(model, LlamaCppModel):
        return _with_llama_cpp(model, options)
    return _with_transformers(model.eval(), options)


def _with_transformers(model: PreTrainedModel, options: ExecutionOptions) -> Execution:
    architecture = Architecture.of(model)
    if options.cuda_graphs:
        check_graphs(model)
    if options.grouped_attention_in_place:
        read_in_place(model)
    is_prepacked, with_graphs = options.prepacked is not False, options.cuda_graphs
    if is_prepacked:
        run_in_short_lived_thread(lambda: prepack(model, unasked=options.prepacked is None))
    run_in_short_lived_thread(partial(verify_compatibility, model, architecture))
    memory = MemoryBudget.of(
        model,
        architecture,
        max_rows=options.max_rows,
        max_prefix_bytes=options.max_prefix_bytes,
        max_bytes=options.max_cache_bytes,
    )
    cache = RaggedKVCache(
        architecture.num_layers,
        max_rows=options.max_rows,
        max_prefix_bytes=memory.max_prefix_bytes,
        max_tokens=memory.max_tokens,
    )
    return Execution(
        model=model,
        device=model.device,
        forward=ModelRunner(model, cache, architecture, is_prepacked=is_prepacked, with_graphs=with_graphs),
        cache=cache,
        memory=memory,
        max_positions=architecture.max_positions,
        keeps_logits=architecture.keeps_logits,
        takes_trees=True,
        measured_costs=partial(
            known_forward_cost, model, architecture, is_prepacked=is_prepacked, with_graphs=with_graphs
        ),
        repack=partial(repack, model),
    )


def _with_llama_cpp(model: LlamaCppModel, options: ExecutionOptions) -> Execution:
    if options.cuda_graphs:
        raise ValueError("cuda_graphs=True is for transformers models on a GPU, not for llama.cpp")
    ready = model.ready(
        max_rows=options.max_rows,
        max_prefix_bytes=options.max_prefix_bytes,
        max_bytes=options.max_cache_bytes,
    )
    memory = MemoryBudget(
        ready.max_prefix_bytes, ready.num_bytes, ready.bytes_per_token, useful_tokens=ready.max_tokens
    )
    memory.require(2)
    return Execution(
        model=model.description,
        device=torch.device("cpu"),
        forward=ready.rows.forward,
        cache=ready.rows,
        memory=memory,
        max_positions=ready.max_positions,
        keeps_logits=True,
        takes_trees=False,
        measured_costs=model.measured_costs,
        repack=lambda: None,  # the file does not change
    )
