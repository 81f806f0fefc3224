"""Lines in, lines out: what one line of the input asks for, and what the output says to it.

Knows JSON and the tokenizer. Does not know files or the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from local_backend.chat_prompt import chat_prompt
from local_backend.openai_shape import text_of
from local_backend.sampling import SamplingParams
from local_backend.sequence import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EXPECTED = (
    'a "prompt" (text, which is continued as it is), "messages" (a list of {"role", "content"}, which are '
    'answered) or "prompt_ids" (a list of token ids)'
)
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")


@dataclass(frozen=True, slots=True)
class Request:
    """What one line asks for.

    Attributes:
        prompt_ids: Token ids to continue.
        num_context_tokens: How many of the last are the beginning of the answer.
        params: How it is written.
        references: Text that may be copied.
    """

    prompt_ids: list[int]
    num_context_tokens: int
    params: SamplingParams
    references: list[str]


def read_request(
    record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, defaults: SamplingParams, *, seed: int
) -> Request:
    """What a line asks for; keys that are not known are not read.

    Args:
        record: A ``prompt``, ``messages`` or ``prompt_ids``; and, if it likes, ``references``,
            ``max_tokens``, ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``seed`` and ``stop``.
        tokenizer: The model's.
        defaults: What counts where the line says nothing.
        seed: For this line; the same whenever it is written.

    Raises:
        TypeError: A value is of another type than it has to be.
        ValueError: There is nothing to continue, or a value is out of range.
    """
    prompt_ids, num_context_tokens = _prompt(record, tokenizer)
    given = {name: record[name] for name in _PARAMETERS if record.get(name) is not None}
    if "stop" in given:
        stop = given["stop"]
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    params = replace(defaults, **{"seed": seed, **given})
    references = record.get("references") or []
    if isinstance(references, str) or not all(isinstance(text, str) for text in references):
        raise TypeError('"references" are a list of texts')
    return Request(prompt_ids, num_context_tokens, params, list(references))


def _prompt(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    if "prompt_ids" in record:
        return [int(token) for token in record["prompt_ids"]], 0
    if isinstance(record.get("prompt"), str):
        return list(tokenizer.encode(record["prompt"], add_special_tokens=False)), 0
    messages = record.get("messages")
    if isinstance(messages, Sequence) and messages and all(isinstance(turn, Mapping) for turn in messages):
        return chat_prompt(tokenizer, [{**turn, "content": text_of(dict(turn))} for turn in messages])
    raise ValueError(f"there is no prompt (it has: {', '.join(record) or 'nothing'}): expected {_EXPECTED}")


def answer_line(number: int, record: object, completion: Completion) -> str:
    """The output's line for a finished row: nothing in it depends on when or with whom it ran."""
    return _line(
        number,
        record,
        {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "num_prompt_tokens": completion.num_prompt_tokens,
            "num_tokens": len(completion.token_ids),
        },
    )


def error_line(number: int, record: object, error: BaseException) -> str:
    """The output's line for a row that could not be written."""
    return _line(number, record, {"error": f"{type(error).__name__}: {error}"})


def _line(number: int, record: object, content: Mapping[str, Any]) -> str:
    named = {"id": record["id"]} if isinstance(record, Mapping) and "id" in record else {}
    return json.dumps({"line": number, **named, **content}, ensure_ascii=False) + "\n"
