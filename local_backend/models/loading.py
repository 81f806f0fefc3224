"""Loads a ``transformers`` model and its tokenizer from any source, in a dtype that is fast on the device.

Knows ``from_pretrained`` and which dtypes a device computes fast. Does not know the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from local_backend.caching.cache_layer import explained
from local_backend.kernels.openmp import run_in_short_lived_thread
from local_backend.kernels.quantization import quantize
from local_backend.models.default_model import default_model_path
from local_backend.models.files import find_model
from local_backend.models.gguf import load_gguf

# Options of a model that hold for its tokenizer, too.
_OF_BOTH = {"cache_dir", "local_files_only", "revision", "subfolder", "token", "trust_remote_code"}


def load(
    path_or_name: str | Path | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device | None = "auto",
    quantization: str | None = None,
    model_options: dict[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model.

    Args:
        path_or_name: A folder, a GGUF file, or a name on the model hub; omit it for the default model, see
            :mod:`~local_backend.models.default_model`.
        dtype: Of weights and computation: "auto" for bfloat16 where the device computes it, else float32.
        device: Where the model runs, see :func:`choose_device`; on the CPU if it is quantized, and where a
            ``device_map`` of ``model_options`` says, unless given.
        quantization: ``"int4"`` rounds the weights, see :mod:`~local_backend.kernels.quantization`.
        model_options: Further arguments of ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        OSError: There is no such model, or no default model can be found.
        ValueError: A file is damaged, is something else or cannot be read by ``transformers``; or ``dtype``,
            ``device`` or ``quantization`` is unknown or cannot be used here.
    """
    options = dict(model_options or {})
    is_mapped = "device_map" in options and device in (None, "auto")
    device = choose_device("cpu" if quantization is not None and device in (None, "auto") else device)
    options["dtype"] = dtype = _number_format(dtype, device)
    where = {name: options[name] for name in _OF_BOTH & options.keys()}
    path_or_name = default_model_path() if path_or_name is None else find_model(path_or_name, **where)
    if Path(path_or_name).is_file():
        model, tokenizer = load_gguf(Path(path_or_name), options)
    else:
        model, tokenizer = _from_pretrained(path_or_name, options, where)
    if not is_mapped:
        try:
            model = cast("Any", model).to(device)
        except RuntimeError as error:
            size = sum(each.nbytes for each in model.state_dict().values()) / 2**30
            about = f"{size:.2f} GiB of weights in {dtype} on {device}: take a smaller model or device='cpu'"
            raise explained(error, about) from None
    if quantization is not None:
        run_in_short_lived_thread(lambda: quantize(model, quantization))
    return model, tokenizer


def choose_device(device: str | torch.device | None = "auto") -> torch.device:
    """The device that is meant; by ``"auto"`` a GPU if there is one, else Apple's, else the CPU.

    Raises:
        ValueError: The device cannot be used.
    """
    if device in (None, "auto"):
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={str(device)!r} cannot be used here: {error}") from None


def _from_pretrained(
    path_or_name: str | Path, options: dict[str, Any], where: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_name, **where)
        return AutoModelForCausalLM.from_pretrained(path_or_name, **options), tokenizer
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        said = " ".join(str(error).split())[:300]
        raise kind(f"cannot load {str(path_or_name)!r}, from here or from the hub: {said}") from error


def _number_format(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if bf16_is_fast(device) else torch.float32
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ValueError(f'dtype must be "auto" or a floating-point type such as "float32", got {dtype!r}')
    return named


def bf16_is_fast(device: str | torch.device | None = None) -> bool:
    """Whether ``device`` (by default as :func:`choose_device`) computes bfloat16 natively.

    Without native units it is emulated: matrix products then take ten to thirty times as long as in float32.
    """
    kind = torch.device(device or choose_device()).type
    if kind == "cpu":
        units = torch.cpu.get_capabilities()
        return any(units.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return False
