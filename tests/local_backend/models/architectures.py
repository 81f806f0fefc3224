"""Nine architectures with tiny random weights: real modelling code, so a wrong mask or position shows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 500
WINDOW = 12  # shorter than most prompts

_GROUPED: dict[str, object] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_CHANGES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 1},
    "mistral": {"sliding_window": WINDOW},
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "gpt_neox": {"num_key_value_heads": None},
    "phi3": {"sliding_window": WINDOW},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "final_logit_softcapping": 20.0,
        "query_pre_attn_scalar": 16,
    },
    "olmo2": {},
}
ARCHITECTURES = tuple(_CHANGES)


def random_model(architecture: str, **changes: Any) -> PreTrainedModel:
    """A model whose answers wander instead of collapsing into one token."""
    options: dict[str, Any] = {
        **({} if architecture == "gpt2" else _GROUPED),
        **_CHANGES.get(architecture, {}),
        "vocab_size": VOCABULARY,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 7,
        "pad_token_id": 0,
        **changes,
    }
    options = {name: value for name, value in options.items() if value is not None or name == "bos_token_id"}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**options)).eval()
