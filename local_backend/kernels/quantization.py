"""Weights in 4 bits: linear layers rounded to a grid, and torch's kernel that multiplies them.

One token reads every weight, so its forward takes as long as the weights are wide. Each 32 weights of a row
share a grid of 16 steps: a scale and a zero point in bfloat16, as in the blocks of a GGUF's Q4_1. The layers
keep their weights, rounded to the grid, in bfloat16, for products of many columns, ``model.generate`` and
training; both compute the same up to rounding. On one thread SmolLM2-135M decodes single answers 1.5 times as
fast as in bfloat16. The weights of ``torchao``'s prototype for a CPU reach 0.83 of that, and 0.55 end to end
for answers that copy from a prompt of 586 tokens.

Knows linear layers. Does not know when the kernel is used: :mod:`~local_backend.kernels.prepacked` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUP_SIZE = 32  # weights that share a grid
_NUM_STEPS = 16
_ROW_STEP = 16  # the kernel wants multiples of this many rows
GRID = "grid_in_4_bits"  # a buffer of rounded layers


def quantize(model: PreTrainedModel, quantization: str) -> None:
    """Round the weights of the linear layers to 4 bits, those of the output layer excepted.

    Args:
        model: In bfloat16, on the CPU.
        quantization: ``"int4"``.

    Raises:
        ValueError: The quantization is unknown, or the model has another dtype or device.
    """
    if quantization != "int4":
        raise ValueError(f'quantization must be "int4" or None, got {quantization!r}')
    if model.dtype != torch.bfloat16 or model.device.type != "cpu":
        raise ValueError(
            f"int4 weights are multiplied in bfloat16 on a CPU, but the model is in {model.dtype} on "
            f"{model.device}: give dtype='bfloat16' and no device, or omit quantization"
        )
    for layer in model.modules():
        if type(layer) is not torch.nn.Linear or layer is model.get_output_embeddings():
            continue
        if not (layer.in_features % GROUP_SIZE or layer.out_features % _ROW_STEP):
            grid = _make_grid(layer.weight)
            with torch.no_grad():
                layer.weight.copy_(_values(_steps(layer.weight, grid), grid))
            layer.register_buffer(GRID, grid, persistent=False)


def product_in_4_bits(weight: Tensor, grid: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """The product with weights ``[out, in]`` that were rounded to a grid ``[out, in / group, 2]``.

    From ``[..., in]`` to ``[..., out]``; ``None`` if a weight is no longer on the grid.
    """
    steps = _steps(weight, grid)
    if not torch.equal(_values(steps, grid).to(weight.dtype), weight):
        return None
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps.flatten(1).to(torch.int32), 1)
    scales_and_zeros = grid.transpose(0, 1).contiguous()  # [in / group, out, 2]
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def product(inputs: Tensor) -> Tensor:
        output: Tensor = multiply(inputs.flatten(0, -2), packed, GROUP_SIZE, scales_and_zeros)
        output = output.view(*inputs.shape[:-1], output.shape[-1])
        return output if bias is None else output + bias

    return product


def _make_grid(weight: Tensor) -> Tensor:
    """Scale and zero point of each group, ``[out, in / group, 2]``, from the group's range."""
    low, high = weight.detach().unflatten(1, (-1, GROUP_SIZE)).aminmax(dim=-1)
    scale = ((high.float() - low.float()) / (_NUM_STEPS - 1)).clamp_min(1e-8)
    # The kernel counts steps from the middle one.
    return torch.stack([scale, low.float() + _NUM_STEPS / 2 * scale], -1).to(torch.bfloat16)


def _steps(weight: Tensor, grid: Tensor) -> Tensor:
    """The nearest step of each weight, ``[out, in / group, group]``, 0 to 15."""
    scale, zero = grid.float().unsqueeze(-2).unbind(-1)
    steps: Tensor = weight.detach().float().unflatten(1, (-1, GROUP_SIZE)).sub(zero).div_(scale)
    return steps.add_(_NUM_STEPS / 2).round_().clamp_(0, _NUM_STEPS - 1)


def _values(steps: Tensor, grid: Tensor) -> Tensor:
    """The weights at ``steps``, ``[out, in]``."""
    scale, zero = grid.float().unsqueeze(-2).unbind(-1)
    return steps.sub(_NUM_STEPS / 2).mul_(scale).add_(zero).flatten(1)
