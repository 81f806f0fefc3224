"""Messages as token ids, by the tokenizer's chat template. Knows roles and texts. Does not know LangChain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_prompt(tokenizer: PreTrainedTokenizerBase, turns: Sequence[dict[str, Any]]) -> tuple[list[int], int]:
    """Token ids of rendered turns, and how many of the last belong to a reply already begun.

    Args:
        tokenizer: Has a chat template.
        turns: ``role`` and ``content``, a text; a last one of the assistant is continued.
    """
    begun = turns[-1]["content"] if turns[-1]["role"] == "assistant" else ""
    token_ids = tokenizer.apply_chat_template(
        list(turns if begun or turns[-1]["role"] != "assistant" else turns[:-1]),
        tokenize=True,
        return_dict=False,
        add_generation_prompt=not begun,
        continue_final_message=bool(begun),
    )
    if not begun:
        return [*map(int, token_ids)], 0
    return [*map(int, token_ids)], len(tokenizer.encode(begun, add_special_tokens=False))
