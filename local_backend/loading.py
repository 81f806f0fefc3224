"""Loading a ``transformers`` model and its tokenizer, with the defaults that suit decoding here.

Knows ``transformers``' ``from_pretrained``. Does not know the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(
    path_or_name: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    model_options: dict[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model that can chat.

    Args:
        path_or_name: Folder, or name on the model hub.
        dtype: Of the computation; float32 on CPU unless given, otherwise as stored.
        device: Where to; CPU unless given.
        model_options: Further arguments of ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        ImportError: The ``local`` extra is not installed.
        OSError: There is no such model.
        ValueError: Its tokenizer has no chat template.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "local models need torch: pip install 'langchain-parallel-decoding[local]'"
        ) from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    on_cpu = torch.device(device or "cpu").type == "cpu"
    if dtype is None:
        dtype = torch.float32 if on_cpu else "auto"
    tokenizer = AutoTokenizer.from_pretrained(path_or_name)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {str(path_or_name)!r} has no chat template: set "
            "tokenizer.chat_template and pass ChatLocal(engine=Engine(model, tokenizer))"
        )
    model = AutoModelForCausalLM.from_pretrained(path_or_name, dtype=dtype, **(model_options or {}))
    if device is not None:
        model = cast("Any", model).to(device)
    return model, tokenizer
