"""Replays decode forwards as CUDA graphs, so that launching a layer's kernels costs the host no time.

A graph is recorded for each shape: rows are padded to a power of two, widths as always, and the columns that
attention reads to a multiple of 256. Keys and values are written by index, so rows may have any length.
Graphs are recorded on first use, and for as long as the cache's buffers do not move.

Knows shapes and static inputs. Does not know models, drafts or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from local_backend.caching.kv_cache import RaggedKVCache

COLUMN_STEP = 256
_NUM_WARM_UPS = 2  # before recording: libraries allocate their workspaces on first use


class Execution(NamedTuple):
    """How forwards are run.

    Attributes:
        with_graphs: Replay decode forwards as CUDA graphs.
        is_compiled: Compile layers, if :class:`~local_backend.kernels.llama_forward.LlamaForward` knows them.
    """

    with_graphs: bool = False
    is_compiled: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel, compiled: bool | None) -> Execution:
        """What is ``compiled`` and recorded: by default both on one GPU, and nothing elsewhere."""
        devices = {parameter.device for parameter in model.parameters()}
        is_on_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
        return cls(is_on_gpu and compiled is not False, is_on_gpu if compiled is None else compiled)

    def __str__(self) -> str:
        compiled = "compiled" if self.is_compiled else "not compiled"
        return f"{compiled}, {'with' if self.with_graphs else 'without'} CUDA graphs"


AS_THEY_ARE = Execution()


class ForwardInputs(NamedTuple):
    """Inputs of a decode forward."""

    input_ids: Tensor  # [rows, new]
    positions: Tensor  # [rows, new]
    masks: Tensor | dict[str, Tensor]  # [rows, 1, new, columns], by kind of layer if there are several
    row_index: Tensor  # [rows, 1]: the slot of each row
    column_index: Tensor  # [rows, new]: where the new keys and values are written


@dataclass(eq=False)
class GraphedForwards:
    """Forwards by shape, recorded on first use. On a CPU nothing is recorded: every call computes.

    ``forward`` computes logits ``[rows, new, vocabulary]`` from inputs on the model's device.
    """

    forward: Callable[[ForwardInputs], Tensor]
    cache: RaggedKVCache
    device: torch.device
    _recorded: dict[tuple[int, ...], tuple[ForwardInputs, Callable[[], Tensor]]] = field(default_factory=dict)
    _num_moves: int = -1
    _pool: Any = None

    def __call__(self, inputs: ForwardInputs) -> Tensor:
        """Logits ``[rows, new, vocabulary]``; the next call of the same shape overwrites them.

        Inputs are on the CPU, their rows and columns padded as the cache says.
        """
        num_moves, *layout = self.cache.layout
        if self._num_moves != num_moves:
            self._recorded.clear()
            self._pool = None  # torch frees a pool with its last graph
            self._num_moves = num_moves
        key = (*inputs.input_ids.shape, self.cache.num_attended, *layout)
        if key in self._recorded:
            static, run = self._recorded[key]
            for old, new in zip(tree_leaves(static), tree_leaves(inputs), strict=True):
                old.copy_(new, non_blocking=True)
        else:
            static = tree_map(lambda tensor: tensor.to(self.device), inputs)
            run = self._record(static)
            self._recorded[key] = static, run
        return run()

    def _record(self, inputs: ForwardInputs) -> Callable[[], Tensor]:
        if self.device.type != "cuda":
            return lambda: self.forward(inputs)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS):
                self.forward(inputs)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self.forward(inputs)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
