"""Matrix products with prepacked weights, and the linear layers that use them.

Knows linear layers and kernels. Does not know which layers of a model to prepare or whether that pays:
:mod:`~local_backend.kernels.prepacking` does.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from local_backend.kernels.quantization import product_in_4_bits

ANY_COLUMNS = range(1, sys.maxsize)
_LAID_OUT_FOR = 16  # columns

_calls = threading.local()


@contextmanager
def prepacked_products(are_prepacked: bool = True) -> Iterator[None]:
    """Within this context, on this thread, prepared layers use their prepacked weights, or do not."""
    before = getattr(_calls, "are_prepacked", False)
    _calls.are_prepacked = are_prepacked
    _forget_outputs()
    try:
        yield
    finally:
        _calls.are_prepacked = before
        _forget_outputs()


def _forget_outputs() -> None:
    """Drop the outputs of the last product, which were kept for the next of its layers."""
    _calls.product = _calls.inputs = _calls.outputs = None


class PrepackedProduct:
    """The weights of layers that read the same inputs, packed into one matrix.

    Weights that change are repacked at the next use. Call :meth:`forget` after changes that torch does not
    count: those made through ``weight.data`` or by a fused optimizer.

    Args:
        modules: One or more layers that share a :func:`kind_of`.
        columns: Inputs with fewer or more columns are multiplied as usual.
    """

    def __init__(self, modules: Sequence[torch.nn.Linear], columns: range = ANY_COLUMNS) -> None:
        self.columns = columns
        self._references = [weakref.ref(module) for module in modules]  # which own this object
        self._sizes: list[int] = []  # of the outputs; set by pack, as a layer may be only half copied here
        self._dtype: torch.dtype | None = None
        self._multiply: Callable[[Tensor], Tensor] | None = None
        # Of each copied parameter: owner, name, address (None if there was none) and version when copied.
        self._copied: list[tuple[dict[str, Any], str, int | None, int]] = []
        self._kept: list[Tensor] = []

    def __call__(self, inputs: Tensor) -> tuple[Tensor, ...] | None:
        """``[..., in]`` to ``[..., out]`` of each layer, in the inputs' dtype; ``None`` if not applicable."""
        product = self.joined(inputs)
        if product is None:
            return None
        return product.split(self._sizes, -1) if len(self._sizes) > 1 else (product,)

    def joined(self, inputs: Tensor) -> Tensor | None:
        """``[..., in]`` to ``[..., out of all layers]``, else as a call."""
        # In a model of 100 M parameters every microsecond here adds a thousandth to a forward.
        if (
            inputs.numel() // inputs.shape[-1] not in self.columns
            or torch.is_grad_enabled()
            or not (self._is_up_to_date() or self._repacks())
            or inputs.dtype != self._dtype
        ):
            return None
        assert self._multiply is not None
        return self._multiply(inputs)

    @property
    def modules(self) -> list[torch.nn.Linear]:
        """The layers, in the order of the outputs."""
        modules = [reference() for reference in self._references]
        return [module for module in modules if module is not None]

    @torch.no_grad()
    def pack(self) -> None:
        """Pack the layers' current weights."""
        modules = self.modules
        self._sizes = [module.out_features for module in modules]
        self._dtype = modules[0].weight.dtype
        self._multiply = product_in_4_bits(modules) or laid_out_product(modules)
        parameters = [
            (module._parameters, name, one) for module in modules for name, one in module._parameters.items()
        ]
        self._copied = [
            (owner, name, None, 0) if one is None else (owner, name, one.data_ptr(), one._version)
            for owner, name, one in parameters
        ]
        # While these are alive, no other tensor gets their address.
        self._kept = [one.detach() for _, _, one in parameters if one is not None]

    def forget(self) -> None:
        """Repack the layers' weights at the next use."""
        self._copied = []

    def _is_up_to_date(self) -> bool:
        for owner, name, place, version in self._copied:
            one = owner[name]
            if one is None:
                if place is not None:
                    return False
            elif one.data_ptr() != place or one._version != version:
                return False
        return bool(self._copied)

    def _repacks(self) -> bool:
        """Repack, unless a layer was moved, converted or replaced so that it cannot be packed."""
        modules = self.modules
        if (
            len(modules) < len(self._references)
            or not all(map(can_be_laid_out, modules))
            or len({*map(kind_of, modules)}) > 1
        ):
            return False
        self.pack()
        return True


class PrepackedLinear:
    """Replaces the forward of a linear layer.

    Args:
        module: The layer.
        product: Of this layer and of others that are called with the same inputs one after another.
        place: Index of this layer in the product.
    """

    def __init__(self, module: torch.nn.Linear, product: PrepackedProduct, place: int) -> None:
        self._module_reference = weakref.ref(module)  # which owns this object
        self._place = place
        self.product = product

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in the dtype of the inputs."""
        if getattr(_calls, "are_prepacked", False):
            if _calls.product is self.product and _calls.inputs is inputs:
                outputs = _calls.outputs
            else:
                outputs = self.product(inputs)
                _calls.product, _calls.inputs, _calls.outputs = self.product, inputs, outputs
            if outputs is not None:
                output: Tensor = outputs[self._place]
                return output
        return usual_product(self._module, inputs)

    # A copied layer has its own weights and gets its own product.

    def __deepcopy__(self, memo: dict[int, Any]) -> PrepackedLinear:
        return _alone(copy.deepcopy(self._module, memo), self.product.columns)

    def __reduce__(self) -> tuple[Any, ...]:
        return _alone, (self._module, self.product.columns)

    @property
    def _module(self) -> torch.nn.Linear:
        module = self._module_reference()
        assert module is not None
        return module


def _alone(module: torch.nn.Linear, columns: range) -> PrepackedLinear:
    return PrepackedLinear(module, PrepackedProduct([module], columns), 0)


def laid_out_product(modules: Sequence[torch.nn.Linear]) -> Callable[[Tensor], Tensor]:
    """The product of layers that read the same inputs, whose outputs it concatenates, by oneDNN."""
    weight = torch.cat([module.weight.detach() for module in modules])
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    dtype = laid_out_type(weight.dtype)
    bias = torch.cat(biases).to(dtype) if biases else None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), _LAID_OUT_FOR)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(inputs: Tensor) -> Tensor:
        output: Tensor = multiply(inputs, packed, bias, "none", [], "")
        return output

    def in_float32(inputs: Tensor) -> Tensor:
        return product(inputs.to(torch.float32)).to(inputs.dtype)

    return in_float32 if is_emulated(weight.dtype) else product


@cache
def is_emulated(dtype: torch.dtype) -> bool:
    """Whether this machine computes products of a dtype in float32."""
    return dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def laid_out_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which weights of a dtype are packed."""
    return torch.float32 if is_emulated(dtype) else dtype


def can_be_laid_out(module: torch.nn.Linear) -> bool:
    """Whether oneDNN can pack a layer's weights."""
    weight = module.weight
    return (
        weight.dtype in (torch.float32, torch.bfloat16)
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and not weight.is_inference()  # its changes cannot be detected
    )


def kind_of(module: torch.nn.Linear) -> tuple[object, ...]:
    """What layers must have in common to share a product."""
    return module.in_features, module.weight.dtype, module.bias is None


def usual_product(module: torch.nn.Linear, inputs: Tensor) -> Tensor:
    """The layer's product without prepacking."""
    return linear(inputs, module.weight, module.bias)
