"""Matrix products on a CPU with prepacked weights, in the layout of the kernel for a few columns.

A forward that verifies drafts multiplies every weight matrix by a handful of columns, for which torch's usual
product spends more time on rearranging the matrix than on multiplying: the matrices of a Llama of 108 M
parameters take 34 ms for one column and 83 ms for eight (float32, two cores of a Zen 3). Packed once by
oneDNN, they take 23 and 34 ms; on a Zen 5, 0.5 to 0.8 of the time in float32 and bfloat16, for any number of
columns. Layers that read the same inputs (queries, keys and values; gate and up projections) are multiplied
together.

Only the engine's forwards use prepacked weights: other callers of the model compute as before. Knows linear
layers and kernels. Does not know rows or drafts.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from local_backend.kernels.quantization import GRID, product_in_4_bits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_READ_THE_SAME = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_LEAST_WEIGHTS = 2**14  # of a product; a smaller one costs little more than the call
_PACKED_FOR = 16  # columns
_ANY_COLUMNS = range(1, sys.maxsize)
_COLUMNS_IN_4_BITS = range(1, 9)  # for more, the kernel is slower than native bfloat16
_FREE_SHARE = 0.25  # limit for copies that nobody asked for

_calls = threading.local()


def prepack(model: PreTrainedModel, *, unasked: bool = False) -> bool:
    """Prepack the linear layers of a model on a CPU, for the engine's forwards.

    Layers that are already prepacked are packed again at the next use: the model may have been trained since,
    by an optimizer that hides this from torch.

    Args:
        model: In float32 or bfloat16.
        unasked: Whether to do so only if the copies fit well into free memory.

    Returns:
        Whether any layer is prepacked now; always false for a model without a large linear layer.
    """
    if has_prepacked(model):
        repack(model)
        return True
    groups = _groups(model)
    if unasked and sum(one.weight.nbytes for group in groups for one in group) > _FREE_SHARE * _free_bytes():
        return False
    for group in groups:
        product = PrepackedProduct([LayerTensors.of(module) for module in group])
        for index, module in enumerate(group):
            vars(module)["forward"] = PrepackedLinear(product, index)
    return bool(groups)


def repack(model: torch.nn.Module) -> None:
    """Pack the weights of every prepacked product again at its next use."""
    for layer in _prepacked(model):
        layer.product.forget()


def has_prepacked(model: torch.nn.Module) -> bool:
    """Whether any layer of a model is prepacked."""
    return any(True for _ in _prepacked(model))


@contextmanager
def prepacked_products() -> Iterator[None]:
    """Within this context, on this thread, prepacked layers use their prepacked weights."""
    _calls.product = _calls.inputs = _calls.outputs = None  # of the last product, for the next of its layers
    _calls.are_prepacked = True
    try:
        yield
    finally:
        vars(_calls).clear()


class LayerTensors(NamedTuple):
    """Where a linear layer keeps its tensors; unlike the layer, they do not own its new forward."""

    parameters: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]

    @classmethod
    def of(cls, module: torch.nn.Module) -> LayerTensors:
        """Those of a layer."""
        return cls(module._parameters, module._buffers)  # type: ignore[arg-type]  # of parameters

    @property
    def weight(self) -> Tensor:
        """``[out, in]``."""
        weight = self.parameters["weight"]
        assert weight is not None
        return weight


class PrepackedProduct:
    """The weights of layers that read the same inputs, packed into one matrix.

    These have one number of inputs, and all or none have a bias. Weights that change are packed again at the
    next use. Call :meth:`forget` after changes that torch does not count: those made through ``weight.data``
    or by a fused optimizer.
    """

    def __init__(self, layers: Sequence[LayerTensors]) -> None:
        self.layers = layers
        self.sizes: list[int] = []  # of the outputs; set by _pack, as a layer may be only half copied here
        self._columns = range(0)
        self._dtype: torch.dtype | None = None
        self._multiply: Callable[[Tensor], Tensor] | None = None
        # Of each packed parameter: owner, name, address (None if there was none), version and a reference,
        # which keeps other tensors from getting that address.
        self._packed: list[tuple[dict[str, Any], str, int | None, int, Tensor | None]] = []

    def __call__(self, inputs: Tensor) -> Tensor | None:
        """``[..., in]`` to ``[..., out of all layers]`` in the inputs' dtype; ``None`` if not applicable."""
        # In a model of 100 M parameters every microsecond here adds a thousandth to a forward.
        if (
            torch.is_grad_enabled()
            or not (self._is_up_to_date() or self._pack())
            or inputs.numel() // inputs.shape[-1] not in self._columns
            or inputs.dtype != self._dtype
        ):
            return None
        assert self._multiply is not None
        return self._multiply(inputs)

    def is_of(self, modules: Sequence[torch.nn.Linear]) -> bool:
        """Whether it multiplies with the weights of exactly these layers."""
        theirs = [id(module._parameters) for module in modules]
        return [id(layer.parameters) for layer in self.layers] == theirs

    def forget(self) -> None:
        """Pack the layers' weights again at the next use."""
        self._packed = []

    def _is_up_to_date(self) -> bool:
        for owner, name, address, version, _ in self._packed:
            one = owner[name]
            if one is None:
                if address is not None:
                    return False
            elif one.data_ptr() != address or one._version != version:
                return False
        return bool(self._packed)

    @torch.no_grad()
    def _pack(self) -> bool:
        """Pack the current weights, unless a layer was moved or converted so that it cannot be packed."""
        if not all(map(_can_be_packed, self.layers)) or len({*map(_kind, self.layers)}) > 1:
            return False
        weight = torch.cat([layer.weight.detach() for layer in self.layers])
        biases = [bias.detach() for layer in self.layers if (bias := layer.parameters["bias"]) is not None]
        bias = torch.cat(biases) if biases else None
        grids = [grid for layer in self.layers if (grid := layer.buffers.get(GRID)) is not None]
        are_rounded, has_units = len(grids) == len(self.layers), _has_units(weight.dtype)
        in_4_bits = product_in_4_bits(weight, torch.cat(grids), bias) if are_rounded else None
        if not (in_4_bits or has_units):  # rounded weights that have left their grid, on an older processor
            return False
        self._multiply = in_4_bits or _packed_product(weight, bias)
        self._columns = _COLUMNS_IN_4_BITS if in_4_bits and has_units else _ANY_COLUMNS
        self.sizes, self._dtype = [len(layer.weight) for layer in self.layers], weight.dtype
        self._packed = [
            (layer.parameters, name, None, 0, None)
            if one is None
            else (layer.parameters, name, one.data_ptr(), one._version, one.detach())
            for layer in self.layers
            for name, one in layer.parameters.items()
        ]
        return True


class PrepackedLinear:
    """Replaces the forward of a linear layer, number ``index`` of those that share ``product``.

    They are called with the same inputs one after another.
    """

    def __init__(self, product: PrepackedProduct, index: int) -> None:
        self.product = product
        self._index = index
        self._layer = product.layers[index]

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in the dtype of the inputs."""
        if getattr(_calls, "are_prepacked", False):
            if _calls.product is not self.product or _calls.inputs is not inputs:
                joined = self.product(inputs)
                _calls.product, _calls.inputs = self.product, inputs
                _calls.outputs = None if joined is None else joined.split(self.product.sizes, -1)
            if _calls.outputs is not None:
                output: Tensor = _calls.outputs[self._index]
                return output
        return linear(inputs, self._layer.weight, self._layer.parameters["bias"])

    def __reduce__(self) -> tuple[Any, ...]:
        return _alone, (self._layer,)  # a copied layer has its own weights and gets its own product


def _alone(layer: LayerTensors) -> PrepackedLinear:
    return PrepackedLinear(PrepackedProduct([layer]), 0)


def _packed_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The product with a matrix that oneDNN has packed."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda inputs: cast("Tensor", multiply(inputs, packed, bias, "none", [], ""))


@cache
def _has_units(dtype: torch.dtype) -> bool:
    """Whether this machine computes products of a dtype as such, and not in float32."""
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _can_be_packed(layer: LayerTensors) -> bool:
    weight = layer.weight
    return (
        weight.dtype in (torch.float32, torch.bfloat16)
        and (GRID in layer.buffers or _has_units(weight.dtype))
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and not weight.is_inference()  # its changes cannot be detected
    )


def _kind(layer: LayerTensors) -> tuple[object, ...]:
    """What layers must have in common to share a product."""
    return layer.weight.shape[1], layer.weight.dtype, layer.parameters["bias"] is None


def _groups(model: PreTrainedModel) -> list[list[torch.nn.Linear]]:
    """The linear layers worth packing; those that read the same inputs stand together."""
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return []
    groups: list[list[torch.nn.Linear]] = []
    for parent in model.modules():
        layers = {
            name: child
            for name, child in parent.named_children()
            if type(child) is torch.nn.Linear
            and "forward" not in vars(child)  # patched by other code
            and _can_be_packed(LayerTensors.of(child))
        }
        for names in _READ_THE_SAME:
            group = [layers[name] for name in names if name in layers]
            if len(group) == len(names) and len({_kind(LayerTensors.of(layer)) for layer in group}) == 1:
                groups.append([layers.pop(name) for name in names])
        groups += [[layer] for layer in layers.values()]
    return [group for group in groups if sum(layer.weight.numel() for layer in group) >= _LEAST_WEIGHTS]


def _prepacked(model: torch.nn.Module) -> Iterator[PrepackedLinear]:
    for module in model.modules():
        if isinstance(layer := vars(module).get("forward"), PrepackedLinear):
            yield layer


def _free_bytes() -> int:
    """Memory that no process uses; 4 GiB if the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30
