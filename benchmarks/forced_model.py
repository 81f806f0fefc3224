"""A model with random weights that writes given texts, for timing on a GPU without a host in the way.

Random weights say nothing, and a logits processor per row and token would distort the times of a GPU. So the
model itself raises the next token of a given text above all others, at the same small cost for every way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.copy_workloads import llama_config
from benchmarks.peers import Task

_CERTAIN = 1e4  # a logit above all others
VOCABULARY_SIZE = 32_000
NUM_SPECIAL = 64  # first token ids, which no text has: among them may be the end and the padding token


class ForcedLlama(LlamaForCausalLM):
    """A Llama that writes given texts, whatever its weights.

    Each text has ``ids_per_text`` token ids of its own, so a token tells which text it belongs to, and its
    position which token follows.
    """

    texts: Tensor | None = None  # [texts, positions]
    ids_per_text = 1

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> Any:
        """As of any Llama, with the logit of the given next token raised above all others."""
        if position_ids is None:
            first = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(first, first + input_ids.shape[1], device=input_ids.device)[None]
        output = super().forward(input_ids, attention_mask, position_ids, past_key_values, **others)
        if self.texts is not None:
            num_kept = output.logits.shape[1]
            text = (input_ids[:, -num_kept:] - NUM_SPECIAL) // self.ids_per_text
            following = (position_ids[:, -num_kept:] + 1).clamp(max=self.texts.shape[1] - 1)
            token = self.texts[text.clamp(0, len(self.texts) - 1), following]
            output.logits.scatter_(-1, token[..., None], _CERTAIN)
        return output

    def force(self, tasks: Sequence[Task], ids_per_text: int) -> None:
        """Write the targets of ``tasks`` from now on."""
        texts = [[*task.prompt, *(task.target or ())] for task in tasks]
        width = max(map(len, texts)) + 1
        padded = [[*text, *[text[-1]] * (width - len(text))] for text in texts]
        self.texts = torch.tensor(padded, device=self.device)
        self.ids_per_text = ids_per_text


def relabelled(tasks: Sequence[Task]) -> tuple[list[Task], int]:
    """The tasks with token ids of their own, and how many ids each has.

    What is equal within a task stays equal, so there is as much to copy as before.
    """
    ids_per_text = max(len({*task.prompt, *(task.target or ())}) for task in tasks)
    changed = []
    for number, task in enumerate(tasks):
        label: dict[int, int] = {}
        ids = [
            NUM_SPECIAL + number * ids_per_text + label.setdefault(token, len(label))
            for token in (*task.prompt, *(task.target or ()))
        ]
        prompt, target = ids[: len(task.prompt)], ids[len(task.prompt) :]
        changed.append(Task(tuple(prompt), (), tuple(target), len(target)))
    return changed, ids_per_text


def forced_model(shape: str, device: str, vocabulary_size: int = VOCABULARY_SIZE) -> ForcedLlama:
    """A :class:`ForcedLlama` with random weights; in bfloat16 on a GPU."""
    config = llama_config(shape, vocabulary_size)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            return cast("ForcedLlama", cast("Any", ForcedLlama(config)).eval())
    finally:
        torch.set_default_dtype(previous)
