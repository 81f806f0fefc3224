"""What the engine needs to know about a model, and which models it cannot decode.

Rows of different lengths share a forward, drafts are trees, and rejected tokens are rolled back by moving a
length. So the model must use the mask and positions it is given, and keep no state of a token but its keys
and values. This module checks the configuration; :mod:`local_backend.models.compatibility` runs the model.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LAYER_KINDS = {"full_attention", "sliding_attention"}
_ATTENTION_IMPLEMENTATIONS = {"eager", "sdpa"}
_ARGUMENTS = ("input_ids", "attention_mask", "position_ids")
_NO_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the engine needs to know about a model.

    Attributes:
        num_layers: Decoder layers.
        max_positions: Maximum tokens of prompt and answer together.
        windows: Sliding window in tokens for each kind of layer, ``None`` for full attention.
        mask_dtype: Dtype of the attention mask: a float type for additive masks, or ``torch.bool``.
        device: Device of token ids, positions and masks.
        keeps_logits: Whether the model can compute logits for its last tokens only.
    """

    num_layers: int
    max_positions: int
    windows: Mapping[str, int | None]
    mask_dtype: torch.dtype
    device: torch.device
    keeps_logits: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> Architecture:
        """Read a model's configuration.

        Raises:
            ValueError: The model cannot be decoded losslessly in a batch; says why and what to use instead.
        """
        config = model.config.get_text_config(decoder=True)
        _check(model, config)
        return cls(
            num_layers=config.num_hidden_layers,
            max_positions=_max_positions(model, config),
            windows=_windows(config),
            mask_dtype=_mask_dtype(model, config),
            device=_input_device(model),
            keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
        )


def cache_argument(module: torch.nn.Module) -> str:
    """What a forward calls its cache: ``cache`` from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(type(module).forward).parameters else "past_key_values"


def _check(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Raise a ``ValueError`` for models that rows and drafts cannot share a forward of."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder-decoder model, but the engine continues one sequence of tokens: "
            "use a decoder-only model, or call model.generate"
        )
    if not model.can_generate():
        raise ValueError(
            f"{name} has no language-model head: load it with AutoModelForCausalLM.from_pretrained"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or not kinds <= _LAYER_KINDS:
        others = ", ".join(sorted(kinds - _LAYER_KINDS)) or "recurrent"
        raise ValueError(
            f"{name} has layers of another kind ({others}): only the keys and values of full and "
            "sliding-window attention can be masked per row, and rolled back when a draft is refused. "
            "Call model.generate, or use a model with such attention in every layer"
        )
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in (*_ARGUMENTS, cache_argument(model)) if name not in parameters]
    if missing and "input_ids" in parameters:  # a wrapper that forwards all its arguments names none of them
        raise ValueError(
            f"{name} does not take {' and '.join(missing)}, so it cannot be given the positions of "
            "rows of different lengths (it may encode positions as biases by distance, as in ALiBi): "
            "call model.generate, or use a model with rotary or learned positions"
        )
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    if implementation not in _ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"{name} was loaded with attn_implementation={implementation!r}, which cannot "
            "take the mask that keeps drafts and rows apart: call model.set_attn_implementation('sdpa') "
            "first, or load it with attn_implementation='sdpa' ('eager' works too)"
        )
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise ValueError(
            f"{name} attends to later tokens (bidirectional attention), so it does not generate "
            "from left to right: use a causal language model"
        )


def _max_positions(model: PreTrainedModel, config: PretrainedConfig) -> int:
    """Number of positions at which the model's rope stays the same for every row of a batch."""
    positions = int(getattr(config, "max_position_embeddings", 0) or _NO_LIMIT)
    for rope in _ropes(config):
        # Dynamic rope is safe: it changes only beyond max_position_embeddings.
        if rope.get("rope_type") == "longrope":
            unchanged = rope.get("original_max_position_embeddings") or positions
            if unchanged < positions:
                warnings.warn(
                    f"{type(model).__name__} has positions for {positions} tokens, but its long rope changes "
                    f"the positions of every row as soon as one is longer than {unchanged}: prompt and "
                    f"answer are limited to {unchanged} tokens here. For longer texts call model.generate, "
                    "one at a time",
                    stacklevel=4,
                )
                positions = unchanged
    return positions


def _ropes(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """The rope parameters: one set, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    ropes = [parameters] if "rope_type" in parameters else parameters.values()
    yield from (rope for rope in ropes if isinstance(rope, Mapping))


def _windows(config: PretrainedConfig) -> dict[str, int | None]:
    is_used = getattr(config, "use_sliding_window", True) is not False
    window = getattr(config, "sliding_window", None) if is_used else None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # all layers alike
        kinds = ["full_attention" if window is None else "sliding_attention"]
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def _mask_dtype(model: PreTrainedModel, config: PretrainedConfig) -> torch.dtype:
    """Additive if all layers compute in one dtype, which saves a conversion in each layer."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    is_sdpa = getattr(config, "_attn_implementation", None) == "sdpa"
    return torch.bool if is_sdpa and len(dtypes) > 1 else model.dtype


def _input_device(model: PreTrainedModel) -> torch.device:
    """The device that computes the embeddings; offloaded weights are elsewhere between forwards."""
    embeddings = model.get_input_embeddings()
    hook = getattr(embeddings, "_hf_hook", None) or getattr(model, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    device = next(embeddings.parameters()).device if device is None else device
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "meta":
        raise ValueError(
            f"{type(model).__name__} has no weights yet (meta device): load it with from_pretrained"
        )
    return device
