"""Which number format this machine computes fast in. Knows processors, not models."""

from __future__ import annotations

import torch


def bf16_is_fast() -> bool:
    """Whether bfloat16 has units of its own here: on the GPU if there is one, else on the processor.

    Without them it is emulated: matrix products then take ten to thirty times as long as in float32.
    """
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    units = torch.cpu.get_capabilities()
    return any(units.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


__all__ = ["bf16_is_fast"]
