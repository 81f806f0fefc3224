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

Knows models, and which of their layers it pays to prepare. The products themselves are in
:mod:`~local_backend.models.prepacked_linear`; neither knows rows or drafts.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from local_backend.models.prepacked_linear import (
    PrepackedLinear,
    PrepackedProduct,
    can_be_laid_out,
    is_emulated,
    kind_of,
    laid_out_type,
    usual_product,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEAST_WEIGHTS = 150_000  # of a layer; a smaller product costs little beside the call, unless it is emulated
_LEAST_EMULATED_WEIGHTS = 2**14
_TRIED_COLUMNS = (1, 4, 8)
_NUM_TRIALS = 5
_FREE_MEMORY_SHARE = 0.25  # that the copies may take unasked
_LEAST_EMULATED_COLUMNS = 2  # for one, the usual product in bfloat16 is faster: it reads half the bytes


def prepack(model: PreTrainedModel, *, unasked: bool = False) -> bool:
    """Prepare the linear layers of a model on a CPU; they are used within ``prepacked_products``.

    Where they are prepared already, the weights are copied again.

    Args:
        model: In float32 or bfloat16.
        unasked: Whether to do so only for products and numbers of columns for which it is faster here, by a
            trial of some milliseconds, and only if the copies fit well into the memory that is free.

    Returns:
        Whether any layer is prepared now; in a model without a large linear layer none ever is.
    """
    if has_prepacked(model):
        repack(model)  # somebody may have trained it since, by an optimizer that hides it from torch
        return True
    products = _products_of(model)
    if unasked:
        products = _faster(products)
        if not _has_room(sum(map(_num_bytes, products))):
            return False
    for product in products:
        product.pack()
        for place, module in enumerate(product.modules):
            vars(module)["forward"] = PrepackedLinear(module, product, place)
    return bool(products)


def unpack(model: torch.nn.Module) -> None:
    """Give the layers their own forward again, and the memory of the copies back."""
    for part in model.modules():
        if isinstance(vars(part).get("forward"), PrepackedLinear):
            del part.forward


def repack(model: torch.nn.Module) -> None:
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
        and can_be_laid_out(part)
    ]
    if not layers:
        return []
    products = []
    for modules in _reading_the_same(model, layers):
        emulated = is_emulated(modules[0].weight.dtype)
        least_weights = _LEAST_EMULATED_WEIGHTS if emulated else _LEAST_WEIGHTS
        if sum(module.weight.numel() for module in modules) >= least_weights:
            products.append(PrepackedProduct(modules, _LEAST_EMULATED_COLUMNS if emulated else 1))
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
        elif inputs is read and kind_of(layer) == kind_of(groups[-1][0]):
            groups[-1].append(layer)
        else:
            groups.append([layer])
            read = inputs
    return groups + [[layer] for layer in layers if times_called[layer] != 1]


def _num_bytes(product: PrepackedProduct) -> int:
    weights = [module.weight for module in product.modules]
    return sum(weight.numel() * laid_out_type(weight.dtype).itemsize for weight in weights)


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
            usual = sum(_seconds_of(partial(usual_product, module, inputs)) for module in modules)
            if _seconds_of(partial(product, inputs)) >= usual:
                break
            least_columns[shape] = columns
    faster = [product for product in products if _shape_of(product) in least_columns]
    for product in faster:
        product.least_columns = least_columns[_shape_of(product)]
    return faster


def _shape_of(product: PrepackedProduct) -> tuple[object, ...]:
    """What the time of a product depends on, beside the columns."""
    return tuple((module.out_features, *kind_of(module)) for module in product.modules)


def _seconds_of(multiply: Callable[[], object]) -> float:
    multiply()  # the first of a shape is slower
    seconds = []
    for _ in range(_NUM_TRIALS):
        started = time.perf_counter()
        multiply()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


__all__ = ["has_prepacked", "prepack", "repack", "unpack"]
