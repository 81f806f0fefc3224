"""Matrix products on a CPU with prepacked weights, in the layout of the kernel for a few columns.

A forward that verifies drafts multiplies every weight matrix by a handful of columns. For so few, torch's
usual product spends more time on rearranging the matrix than on multiplying: on two cores of a Zen 3, the
matrices of a Llama of 108 M parameters take 34 ms for one column and 83 ms for eight in float32. Packed once
by oneDNN, they take 23 and 34 ms. Without bfloat16 units the usual product goes column by column, 93 ms for
eight; here the weights are packed in float32 and products rounded to bfloat16, which takes 34 ms again. For
one column, and on other processors, the usual product may be faster: a trial finds, for each layer shape,
from how many columns on it is slower. Layers that read the same inputs (queries, keys and values; gate and
up projections) are multiplied together: fewer, larger products.

Only the engine's forwards use prepacked weights: other callers of the model compute as before.

Knows models, and which of their layers it pays to prepare. The products themselves are in
:mod:`~local_backend.kernels.prepacked_linear`; neither knows rows or drafts.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from local_backend.kernels.prepacked_linear import (
    ANY_COLUMNS,
    PrepackedLinear,
    PrepackedProduct,
    can_be_laid_out,
    is_emulated,
    kind_of,
    laid_out_type,
    usual_product,
)
from local_backend.kernels.quantization import is_in_4_bits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEAST_WEIGHTS = 150_000  # of a layer; a smaller product costs little more than the call, unless emulated
_LEAST_EMULATED_WEIGHTS = 2**14
_TRIED_COLUMNS = (1, 4, 8)
_NUM_TRIALS, _MOST_TRIED_LAYERS = 5, 8
_COLUMNS_IN_4_BITS = range(1, _TRIED_COLUMNS[-1] + 1)  # for more, the kernel is slower than native bfloat16
_EMULATED_COLUMNS = ANY_COLUMNS[1:]  # for one, the usual product in bfloat16 reads half the bytes
_FREE_MEMORY_SHARE = 0.25  # limit for the copies if ``unasked``


def prepack(model: PreTrainedModel, *, unasked: bool = False) -> bool:
    """Prepack the linear layers of a model on a CPU, for use within ``prepacked_products``.

    Layers that are already prepared are repacked at the next use.

    Args:
        model: In float32 or bfloat16.
        unasked: Whether to prepare only products that a trial of some milliseconds finds faster, for the
            numbers of columns for which they are, and only if the copies fit well into free memory.

    Returns:
        Whether any layer is prepared now; always false for a model without a large linear layer.
    """
    if has_prepacked(model):
        repack(model)  # it may have been trained since, by an optimizer that hides this from torch
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


def repack(model: torch.nn.Module) -> None:
    """Repack the weights of every prepared product at its next use."""
    for layer in _prepacked(model):
        layer.product.forget()


def has_prepacked(model: torch.nn.Module) -> bool:
    """Whether any layer of a model is prepared."""
    return any(True for _ in _prepacked(model))


def _prepacked(model: torch.nn.Module) -> Iterator[PrepackedLinear]:
    for part in model.modules():
        if isinstance(layer := vars(part).get("forward"), PrepackedLinear):
            yield layer


def _products_of(model: PreTrainedModel) -> list[PrepackedProduct]:
    """One for each large enough linear layer or group of layers that read the same inputs."""
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return []
    layers = [
        part
        for part in model.modules()
        if type(part) is torch.nn.Linear
        and "forward" not in vars(part)  # patched by other code
        and can_be_laid_out(part)
    ]
    if not layers:
        return []
    products = []
    for modules in _reading_the_same(model, layers):
        emulated = is_emulated(modules[0].weight.dtype)
        least_weights = _LEAST_EMULATED_WEIGHTS if emulated else _LEAST_WEIGHTS
        if sum(module.weight.numel() for module in modules) >= least_weights:
            columns = _EMULATED_COLUMNS if emulated else ANY_COLUMNS
            if all(map(is_in_4_bits, modules)):
                columns = ANY_COLUMNS if emulated else _COLUMNS_IN_4_BITS
            products.append(PrepackedProduct(modules, columns))
    return products


@torch.inference_mode()
def _reading_the_same(
    model: PreTrainedModel, layers: Sequence[torch.nn.Linear]
) -> list[list[torch.nn.Linear]]:
    """Group the layers that are called with the same input tensor one after another.

    These are queries, keys and values, or gate and up projections. Found by a forward of one token; a layer
    that it does not call, or calls twice, stays alone.
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


def free_bytes() -> int:
    """Memory that no process uses; 4 GiB if the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30


def _has_room(num_bytes: int) -> bool:
    return num_bytes <= _FREE_MEMORY_SHARE * free_bytes()


@torch.inference_mode()
def _faster(products: Sequence[PrepackedProduct]) -> list[PrepackedProduct]:
    """The products that are faster than the layers' own; sets for how many columns they are used."""
    by_shape: dict[tuple[object, ...], list[PrepackedProduct]] = {}
    for product in products:
        by_shape.setdefault(_shape_of(product), []).append(product)
    faster: list[PrepackedProduct] = []
    for alike in by_shape.values():
        # Weights in 4 bits are faster for few columns, as there is less to read; laid out ones for several.
        are_in_4_bits = all(map(is_in_4_bits, alike[0].modules))
        tried = _TRIED_COLUMNS if are_in_4_bits else _TRIED_COLUMNS[::-1]
        won = list(takewhile(partial(_is_faster, alike[:_MOST_TRIED_LAYERS]), tried))
        if won:
            for product in alike:
                columns = product.columns
                if not are_in_4_bits:
                    product.columns = range(won[-1], columns.stop)
                elif len(won) < len(tried):
                    product.columns = range(columns[0], won[-1] + 1)
            faster += alike
    return faster


def _is_faster(products: Sequence[PrepackedProduct], columns: int) -> bool:
    """Whether products of one shape are faster than their layers for a number of columns."""
    if columns not in products[0].columns:
        return False
    layer = products[0].modules[0]
    inputs = torch.zeros(columns, layer.in_features, dtype=layer.weight.dtype)
    usual = [partial(usual_product, module, inputs) for product in products for module in product.modules]
    return _seconds_of([partial(product, inputs) for product in products]) < _seconds_of(usual)


def _shape_of(product: PrepackedProduct) -> tuple[object, ...]:
    """What the time of a product depends on, besides the columns."""
    return tuple((module.out_features, *kind_of(module)) for module in product.modules)


def _seconds_of(products: Sequence[Callable[[], object]]) -> float:
    """Seconds of products that are computed in turn, so that weights come from memory, as in a forward."""
    for multiply in products:
        multiply()  # the first run of a shape is slower
    seconds = []
    for _ in range(_NUM_TRIALS):
        started = time.perf_counter()
        for multiply in products:
            multiply()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
