"""Matrix products on a CPU with weights laid out beforehand, as the kernel for a few columns wants them.

A forward that verifies drafts multiplies every weight matrix by a handful of columns. For so few, torch's
usual product spends more time on rearranging the matrix than on multiplying: on two cores of a Zen 3, the
matrices of a Llama of 108 M parameters take 34 ms for one column and 83 ms for eight in float32. Laid out
once, by oneDNN, they take 23 and 34. Where bfloat16 has no units the usual product goes column by column, 93
ms for eight; here the weights are laid out in float32, products are rounded to bfloat16, and it is 34 again.
For one column, and on other processors, the usual product may be the faster one: a trial tells for each shape
of layer from how many columns on it is not.

Only the engine's forwards use it: whoever else calls the model computes as before.

Knows linear layers. Does not know forwards, rows or drafts.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEAST_WEIGHTS = 150_000  # of a layer; a smaller product costs little beside the call, unless it is emulated
_LEAST_EMULATED_WEIGHTS = 2**14
_LAID_OUT_FOR = 16  # columns
_TRIED_COLUMNS = (1, 4, 8)
_NUM_TRIALS = 5
_FREE_MEMORY_SHARE = 0.25  # that the copies may take unasked
_LEAST_EMULATED_COLUMNS = 2  # for one, the usual product in bfloat16 is faster: it reads half the bytes

_calls = threading.local()


@contextmanager
def prepacked_products(are_prepacked: bool = True) -> Iterator[None]:
    """Within it, on this thread, layers that :func:`prepack` has prepared use what was laid out, or not."""
    before = getattr(_calls, "are_prepacked", False)
    _calls.are_prepacked = are_prepacked
    try:
        yield
    finally:
        _calls.are_prepacked = before


class PrepackedLinear:
    """The forward of a linear layer, in place of its own.

    Weights that change are laid out anew when they are next used. What torch does not count as a change,
    because it was done to ``weight.data``, :func:`lay_out_anew` must tell.

    Args:
        module: The layer.
        least_columns: Fewer are multiplied as usual.
    """

    def __init__(self, module: torch.nn.Linear, least_columns: int = 1) -> None:
        self._module_reference = weakref.ref(module)
        self._least_columns = least_columns
        self._weights: Tensor | None = None
        self._bias: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._multiply: Callable[..., Tensor] | None = None
        # What was copied: its name, where it lay (nowhere, if there is none) and its version then.
        self._copied: list[tuple[str, int | None, int]] = []
        self._kept: list[Tensor] = []

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in the type of the inputs."""
        # In a model of 100 M parameters every microsecond here is a thousandth of a forward.
        if (
            not getattr(_calls, "are_prepacked", False)
            or inputs.numel() < self._least_columns * inputs.shape[-1]
            or torch.is_grad_enabled()
            or not (self._is_up_to_date() or self._lays_out_anew())
            or inputs.dtype != self._dtype
        ):
            return linear(inputs, self._module.weight, self._module.bias)
        assert self._multiply is not None
        if not _is_emulated(inputs.dtype):
            return self._multiply(inputs, self._weights, self._bias, "none", [], "")
        product = self._multiply(inputs.to(torch.float32), self._weights, self._bias, "none", [], "")
        return product.to(inputs.dtype)

    @torch.no_grad()
    def lay_out(self) -> None:
        """Copy the layer's weights as they are now."""
        weight, bias = self._module.weight, self._module.bias
        self._dtype, dtype = weight.dtype, _laid_out_type(weight.dtype)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._weights = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), _LAID_OUT_FOR)
        self._bias = None if bias is None else bias.detach().to(dtype)
        self._copied = [
            (name, None, 0) if one is None else (name, one.data_ptr(), one._version)
            for name, one in (("weight", weight), ("bias", bias))
        ]
        # As long as these are alive, no other takes their place in memory.
        self._kept = [one.detach() for one in (weight, bias) if one is not None]

    def forget(self) -> None:
        """Lay out the layer's weights anew when they are next used."""
        self._copied = []

    def _is_up_to_date(self) -> bool:
        parameters = self._module._parameters
        for name, place, version in self._copied:
            one = parameters[name]
            if one is None:
                if place is not None:
                    return False
            elif one.data_ptr() != place or one._version != version:
                return False
        return bool(self._copied)

    def _lays_out_anew(self) -> bool:
        """Copy the weights, unless the model was moved or converted to where or what they cannot be."""
        if not _can_be_laid_out(self._module.weight):
            return False
        self.lay_out()
        return True

    @property
    def _module(self) -> torch.nn.Linear:
        module = self._module_reference()
        assert module is not None  # it is the one that holds this
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> PrepackedLinear:
        return PrepackedLinear(copy.deepcopy(self._module, memo), self._least_columns)

    def __reduce__(self) -> tuple[Any, ...]:
        return PrepackedLinear, (self._module, self._least_columns)


@cache
def _is_emulated(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _laid_out_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if _is_emulated(dtype) else dtype


def _can_be_laid_out(weight: Tensor) -> bool:
    return (
        weight.dtype in (torch.float32, torch.bfloat16)
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and not weight.is_inference()  # no telling when it changes
    )


def prepack(model: PreTrainedModel, *, unasked: bool = False) -> bool:
    """Prepare the linear layers of a model on a CPU; for :func:`prepacked_products`.

    Args:
        model: In float32 or bfloat16.
        unasked: Whether to do so only for layers and numbers of columns for which it is faster here, by a
            trial of some milliseconds, and only if the copies fit well into the memory that is free.

    Returns:
        Whether any layer is prepared now; in a model without a large linear layer none ever is.
    """
    if has_prepacked(model):
        return True
    layers = _layers(model)
    least_columns = {_shape_of(layer): _least_usable_columns(layer) for layer in layers}
    if unasked:
        least_columns = _least_faster_columns(layers)
        layers = [layer for layer in layers if _shape_of(layer) in least_columns]
        if not _has_room(
            sum(layer.weight.numel() * _laid_out_type(layer.weight.dtype).itemsize for layer in layers)
        ):
            return False
    for layer in layers:
        product = PrepackedLinear(layer, least_columns[_shape_of(layer)])
        product.lay_out()
        vars(layer)["forward"] = product
    return bool(layers)


def unpack(model: torch.nn.Module) -> None:
    """Give the layers their own forward again, and the memory of the copies back."""
    for part in model.modules():
        if isinstance(vars(part).get("forward"), PrepackedLinear):
            del part.forward


def lay_out_anew(model: torch.nn.Module) -> None:
    """Let every layer that was prepared copy its weights again when they are next used."""
    for product in _products(model):
        product.forget()


def has_prepacked(model: torch.nn.Module) -> bool:
    """Whether layers of a model were prepared."""
    return any(True for _ in _products(model))


def _products(model: torch.nn.Module) -> Iterator[PrepackedLinear]:
    for part in model.modules():
        if isinstance(product := vars(part).get("forward"), PrepackedLinear):
            yield product


def _layers(model: PreTrainedModel) -> list[torch.nn.Linear]:
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return []
    return [
        part
        for part in model.modules()
        if type(part) is torch.nn.Linear
        and "forward" not in vars(part)  # somebody else's
        and _can_be_laid_out(part.weight)
        and part.weight.numel()
        >= (_LEAST_EMULATED_WEIGHTS if _is_emulated(part.weight.dtype) else _LEAST_WEIGHTS)
    ]


def _has_room(num_bytes: int) -> bool:
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not told on this system
        return num_bytes < 2**30
    return num_bytes <= _FREE_MEMORY_SHARE * free


def _shape_of(layer: torch.nn.Linear) -> tuple[object, ...]:
    """What the time of a layer's product depends on, beside the columns."""
    return (*layer.weight.shape, layer.weight.dtype, layer.bias is None)


def _least_usable_columns(layer: torch.nn.Linear) -> int:
    return _LEAST_EMULATED_COLUMNS if _is_emulated(layer.weight.dtype) else 1


@torch.inference_mode()
def _least_faster_columns(layers: Sequence[torch.nn.Linear]) -> dict[tuple[object, ...], int]:
    """By shape, from how many columns on the prepacked product is faster; without those where it never is."""
    least_columns: dict[tuple[object, ...], int] = {}
    for shape, layer in {_shape_of(layer): layer for layer in layers}.items():
        product = PrepackedLinear(layer)
        for columns in sorted(_TRIED_COLUMNS, reverse=True):
            inputs = torch.zeros(columns, layer.in_features, dtype=layer.weight.dtype)
            usual = _seconds_of(product, inputs)
            with prepacked_products():
                prepacked = _seconds_of(product, inputs)
            if prepacked >= usual:
                break
            least_columns[shape] = max(columns, _least_usable_columns(layer))
    return least_columns


def _seconds_of(product: PrepackedLinear, inputs: Tensor) -> float:
    product(inputs)  # the first of a shape is slower
    seconds = []
    for _ in range(_NUM_TRIALS):
        started = time.perf_counter()
        product(inputs)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


__all__ = ["PrepackedLinear", "has_prepacked", "lay_out_anew", "prepack", "prepacked_products", "unpack"]
