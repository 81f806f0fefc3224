"""Features of a prompt: the model's hidden states over it.

Knows a ``transformers`` model's hidden states. Does not know lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Features(Protocol):
    """Computes features of prompts; others than hidden states, such as text embeddings, may be given."""

    @property
    def name(self) -> str:
        """The kind of features, saved with what is trained on them."""
        ...

    def __call__(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Features ``[prompts, features]``, float32, on the CPU."""
        ...


class HiddenStates:
    """Mean and maximum of the model's last hidden states over the prompt, and the prompt's length.

    Takes one forward without the language-model head; prompts of similar length share one. The last token's
    state alone carries less: it is about how the answer begins. Mean and maximum are about what is asked.

    Args:
        model: A decoder-only ``transformers`` model; an engine may decode with it at the same time.
        max_forward_tokens: Maximum tokens of a forward, padding included; a longer prompt runs alone.
    """

    name = "hidden_state"

    def __init__(self, model: PreTrainedModel, *, max_forward_tokens: int = 4096) -> None:
        self._model = model
        self._max_forward_tokens = max_forward_tokens

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Features ``[prompts, 2 * hidden size + 1]``; independent of which prompts share the call.

        Raises:
            ValueError: A prompt is empty.
        """
        if not prompts:
            return torch.zeros(0, 0)
        if not all(prompts):
            raise ValueError("a prompt is empty: give at least one token")
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        found: dict[int, Tensor] = {}
        while order:
            longest = len(prompts[order[-1]])
            batch = order[-max(1, self._max_forward_tokens // longest) :]
            del order[-len(batch) :]
            found.update(zip(batch, self._forward([prompts[number] for number in batch]), strict=True))
        return torch.stack([found[number] for number in range(len(prompts))])

    def _forward(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, prompts))
        embeddings: Any = self._model.get_input_embeddings()
        device = embeddings.weight.device
        # Padded on the right, where no token of a prompt attends.
        token_ids = torch.tensor(
            [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device
        )
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        is_token = torch.arange(width, device=device) < lengths[:, None]  # [prompts, width]
        states = self._model.base_model(
            input_ids=token_ids, attention_mask=is_token.long(), use_cache=False
        ).last_hidden_state.float()  # [prompts, width, hidden]
        mean = (states * is_token[:, :, None]).sum(1) / lengths[:, None]
        most = states.masked_fill(~is_token[:, :, None], -torch.inf).amax(1)
        return torch.cat([mean, most, lengths[:, None].float().log()], dim=1).cpu()
