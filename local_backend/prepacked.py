"""Matrix products on a CPU with weights laid out beforehand, as the kernel for a few columns wants them.

A forward that verifies drafts multiplies every weight matrix by a handful of columns. For so few, torch's
usual product spends more time on rearranging the matrix than on multiplying: on two cores of a Zen 3, the
matrices of a Llama of 108 M parameters take 34 ms for one column and 83 ms for eight in float32. Laid out
once, by oneDNN, they take 23 and 34. Where bfloat16 has no units the usual product goes column by column, 93
ms for eight; here the weights are laid out in float32, products are rounded to bfloat16, and it is 34 again.
For one column, and on other processors, the usual product may be the faster one: a trial tells for each shape
of layer from how many columns on it is not. Layers that read the same inputs (queries, keys and values; a
gate and what it lets pass) are multiplied at once: fewer, larger products.

Only the engine's forwards use it: whoever else calls the model computes as before.

Knows linear layers. Does not know forwards, rows or drafts.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
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
    _forget_outputs()
    try:
        yield
    finally:
        _calls.are_prepacked = before
        _forget_outputs()


def _forget_outputs() -> None:
    """Of the product that was computed last, for whichever of its layers is called next."""
    _calls.product = _calls.inputs = _calls.outputs = None


class PrepackedProduct:
    """The weights of layers that read the same inputs, laid out as one matrix.

    Weights that change are laid out anew when they are next used. What torch does not count as a change,
    because it was done to ``weight.data``, :func:`lay_out_anew` must tell.

    Args:
        modules: One or more, of the same type, with or without bias.
        least_columns: Fewer are multiplied as usual.
    """

    def __init__(self, modules: Sequence[torch.nn.Linear], least_columns: int = 1) -> None:
        self.least_columns = least_columns
        self._references = [weakref.ref(module) for module in modules]  # they hold this
        self._sizes: list[int] = []  # of the outputs; read when laid out, as a layer may be half a copy yet
        self._weights: Tensor | None = None
        self._bias: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._multiply: Callable[..., Tensor] | None = None
        # Of each parameter that was copied: whose it is, where it lay, if there was one, its version then.
        self._copied: list[tuple[dict[str, Any], str, int | None, int]] = []
        self._kept: list[Tensor] = []

    def __call__(self, inputs: Tensor) -> tuple[Tensor, ...] | None:
        """``[..., in]`` to ``[..., out]`` of each layer, in the type of the inputs; None is "as usual"."""
        # In a model of 100 M parameters every microsecond here is a thousandth of a forward.
        if (
            inputs.numel() < self.least_columns * inputs.shape[-1]
            or torch.is_grad_enabled()
            or not (self._is_up_to_date() or self._lays_out_anew())
            or inputs.dtype != self._dtype
        ):
            return None
        assert self._multiply is not None
        if _is_emulated(inputs.dtype):
            product = self._multiply(inputs.to(torch.float32), self._weights, self._bias, "none", [], "")
            product = product.to(inputs.dtype)
        else:
            product = self._multiply(inputs, self._weights, self._bias, "none", [], "")
        return product.split(self._sizes, -1) if len(self._sizes) > 1 else (product,)

    @property
    def modules(self) -> list[torch.nn.Linear]:
        """The layers, in the order of the outputs."""
        modules = [reference() for reference in self._references]
        return [module for module in modules if module is not None]

    @torch.no_grad()
    def lay_out(self) -> None:
        """Copy the layers' weights as they are now."""
        modules = self.modules
        self._sizes = [module.out_features for module in modules]
        weight = torch.cat([module.weight.detach() for module in modules])
        biases = [module.bias.detach() for module in modules if module.bias is not None]
        self._dtype, dtype = weight.dtype, _laid_out_type(weight.dtype)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._weights = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), _LAID_OUT_FOR)
        self._bias = torch.cat(biases).to(dtype) if biases else None
        parameters = [
            (module._parameters, name, one) for module in modules for name, one in module._parameters.items()
        ]
        self._copied = [
            (owner, name, None, 0) if one is None else (owner, name, one.data_ptr(), one._version)
            for owner, name, one in parameters
        ]
        # As long as these are alive, no other takes their place in memory.
        self._kept = [one.detach() for _, _, one in parameters if one is not None]

    def forget(self) -> None:
        """Lay out the layers' weights anew when they are next used."""
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

    def _lays_out_anew(self) -> bool:
        """Copy the weights, unless a layer was moved, converted or replaced so that they cannot be."""
        modules = self.modules
        if (
            len(modules) < len(self._references)
            or not all(map(_can_be_laid_out, modules))
            or len({*map(_kind_of, modules)}) > 1
        ):
            return False
        self.lay_out()
        return True


class PrepackedLinear:
    """The forward of a linear layer, in place of its own.

    Args:
        module: The layer.
        product: Of it, and of others that are called with the same inputs one after another.
        place: Of the layer among those.
    """

    def __init__(self, module: torch.nn.Linear, product: PrepackedProduct, place: int) -> None:
        self._module_reference = weakref.ref(module)  # it holds this
        self._place = place
        self.product = product

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in the type of the inputs."""
        if getattr(_calls, "are_prepacked", False):
            if _calls.product is self.product and _calls.inputs is inputs:
                outputs = _calls.outputs
            else:
                outputs = self.product(inputs)
                _calls.product, _calls.inputs, _calls.outputs = self.product, inputs, outputs
            if outputs is not None:
                output: Tensor = outputs[self._place]
                return output
        return _own_product(self._module, inputs)

    # A copy of the layer has weights of its own, and multiplies by itself.

    def __deepcopy__(self, memo: dict[int, Any]) -> PrepackedLinear:
        return _alone(copy.deepcopy(self._module, memo), self.product.least_columns)

    def __reduce__(self) -> tuple[Any, ...]:
        return _alone, (self._module, self.product.least_columns)

    @property
    def _module(self) -> torch.nn.Linear:
        module = self._module_reference()
        assert module is not None
        return module


def _alone(module: torch.nn.Linear, least_columns: int = 1) -> PrepackedLinear:
    return PrepackedLinear(module, PrepackedProduct([module], least_columns), 0)


@cache
def _is_emulated(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _laid_out_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if _is_emulated(dtype) else dtype


def _can_be_laid_out(module: torch.nn.Linear) -> bool:
    weight = module.weight
    return (
        weight.dtype in (torch.float32, torch.bfloat16)
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and not weight.is_inference()  # no telling when it changes
    )


def _kind_of(module: torch.nn.Linear) -> tuple[object, ...]:
    """What layers must have in common to be one product."""
    return module.in_features, module.weight.dtype, module.bias is None


def prepack(model: PreTrainedModel, *, unasked: bool = False) -> bool:
    """Prepare the linear layers of a model on a CPU; for :func:`prepacked_products`.

    Args:
        model: In float32 or bfloat16.
        unasked: Whether to do so only for products and numbers of columns for which it is faster here, by a
            trial of some milliseconds, and only if the copies fit well into the memory that is free.

    Returns:
        Whether any layer is prepared now; in a model without a large linear layer none ever is.
    """
    if has_prepacked(model):
        return True
    products = _products_of(model)
    if unasked:
        products = _faster(products)
        if not _has_room(sum(map(_num_bytes, products))):
            return False
    for product in products:
        product.lay_out()
        for place, module in enumerate(product.modules):
            vars(module)["forward"] = PrepackedLinear(module, product, place)
    return bool(products)


def unpack(model: torch.nn.Module) -> None:
    """Give the layers their own forward again, and the memory of the copies back."""
    for part in model.modules():
        if isinstance(vars(part).get("forward"), PrepackedLinear):
            del part.forward


def lay_out_anew(model: torch.nn.Module) -> None:
    """Let every product that was prepared copy its weights again when they are next used."""
    for layer in _prepacked(model):
        layer.product.forget()


def has_prepacked(model: torch.nn.Module) -> bool:
    """Whether layers of a model were prepared."""
    return any(True for _ in _prepacked(model))


def _prepacked(model: torch.nn.Module) -> Iterator[PrepackedLinear]:
    for part in model.modules():
        if isinstance(layer := vars(part).get("forward"), PrepackedLinear):
            yield layer


def _products_of(model: PreTrainedModel) -> list[PrepackedProduct]:
    """One for each linear layer that is large enough, and for those that read the same inputs."""
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return []
    layers = [
        part
        for part in model.modules()
        if type(part) is torch.nn.Linear
        and "forward" not in vars(part)  # somebody else's
        and _can_be_laid_out(part)
    ]
    if not layers:
        return []
    products = []
    for modules in _reading_the_same(model, layers):
        is_emulated = _is_emulated(modules[0].weight.dtype)
        least_weights = _LEAST_EMULATED_WEIGHTS if is_emulated else _LEAST_WEIGHTS
        if sum(module.weight.numel() for module in modules) >= least_weights:
            products.append(PrepackedProduct(modules, _LEAST_EMULATED_COLUMNS if is_emulated else 1))
    return products


@torch.inference_mode()
def _reading_the_same(
    model: PreTrainedModel, layers: Sequence[torch.nn.Linear]
) -> list[list[torch.nn.Linear]]:
    """The layers, those together that are called with the very same inputs one after another.

    Queries, keys and values are, or a gate and what it lets pass. A forward of one token shows it; what it
    does not call, or calls twice, stays alone.
    """
    calls: list[tuple[torch.nn.Linear, Tensor]] = []

    def note(layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs and isinstance(layer, torch.nn.Linear):
            calls.append((layer, inputs[0]))

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        model(input_ids=torch.tensor([[0]]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    times_called = Counter(layer for layer, _ in calls)
    groups: list[list[torch.nn.Linear]] = []
    read: Tensor | None = None
    for layer, inputs in calls:
        if times_called[layer] > 1:
            read = None
        elif inputs is read and _kind_of(layer) == _kind_of(groups[-1][0]):
            groups[-1].append(layer)
        else:
            groups.append([layer])
            read = inputs
    return groups + [[layer] for layer in layers if times_called[layer] != 1]


def _num_bytes(product: PrepackedProduct) -> int:
    weights = [module.weight for module in product.modules]
    return sum(weight.numel() * _laid_out_type(weight.dtype).itemsize for weight in weights)


def _has_room(num_bytes: int) -> bool:
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not told on this system
        return num_bytes < 2**30
    return num_bytes <= _FREE_MEMORY_SHARE * free


@torch.inference_mode()
def _faster(products: Sequence[PrepackedProduct]) -> list[PrepackedProduct]:
    """Those products that are faster than the layers' own, for as many columns as they are.

    One of each shape is tried.
    """
    least_columns: dict[tuple[object, ...], int] = {}
    for shape, product in {_shape_of(product): product for product in products}.items():
        modules = product.modules
        for columns in sorted(_TRIED_COLUMNS, reverse=True):
            if columns < product.least_columns:
                break
            inputs = torch.zeros(columns, modules[0].in_features, dtype=modules[0].weight.dtype)
            usual = sum(_seconds_of(partial(_own_product, module, inputs)) for module in modules)
            if _seconds_of(partial(product, inputs)) >= usual:
                break
            least_columns[shape] = columns
    faster = [product for product in products if _shape_of(product) in least_columns]
    for product in faster:
        product.least_columns = least_columns[_shape_of(product)]
    return faster


def _shape_of(product: PrepackedProduct) -> tuple[object, ...]:
    """What the time of a product depends on, beside the columns."""
    return tuple((module.out_features, *_kind_of(module)) for module in product.modules)


def _own_product(module: torch.nn.Linear, inputs: Tensor) -> Tensor:
    return linear(inputs, module.weight, module.bias)


def _seconds_of(multiply: Callable[[], object]) -> float:
    multiply()  # the first of a shape is slower
    seconds = []
    for _ in range(_NUM_TRIALS):
        started = time.perf_counter()
        multiply()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


__all__ = [
    "PrepackedLinear",
    "PrepackedProduct",
    "has_prepacked",
    "lay_out_anew",
    "prepack",
    "prepacked_products",
    "unpack",
]
