"""The shapes of OpenAI's chat completions, which tools of that world write and read.

Knows plain dicts, token ids and the tokenizer's ``decode``. Does not know LangChain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from local_backend.choice import TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HALF_CHARACTER = "\ufffd"


def openai_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """``{"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...], "refusal": None}``.

    ``bytes`` is ``None`` where a token is no whole character.
    """
    text_of = _TokenTexts(tokenizer)

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = text_of(token_id)
        whole = _HALF_CHARACTER not in text
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

    content = [
        {
            **entry(one.token_id, one.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in one.top],
        }
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def text_of(turn: dict[str, Any]) -> str:
    """The text of one message.

    Raises:
        ValueError: It holds something other than text.
    """
    content = turn.get("content") or ""
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text":
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise ValueError(
                f"a local model reads text only, but the {turn.get('role')} message holds {kind!r}"
            )
        texts.append(block["text"])
    return "".join(texts)


class _TokenTexts:
    """The text of single tokens, with the space a tokenizer drops where a text begins."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._num_before = len(self._decode(self._before))
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._decode([*self._before, token_id])[self._num_before :]
        return self._known[token_id]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
