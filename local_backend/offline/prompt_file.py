"""Prompts of JSON lines, datasets and records: token ids, checked before any work is done.

Knows tokenizers. Of a model it knows only the numbers of positions and token ids.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from local_backend.langchain.chat_format import chat_prompt
from local_backend.langchain.turns import make_turns
from local_backend.offline.jsonl import read_lines
from local_backend.sequences.request import check_prompt
from local_backend.sequences.tokenizing import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Parsed = TypeVar("_Parsed")
_EXPECTED = (
    'a "prompt" (text, which is continued as it is), a "question" or "messages" (a list of {"role", '
    '"content"}), which are answered, or "prompt_ids" (a list of token ids)'
)


def record_prompt(record: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Token ids of a record's prompt, and how many of the last ones belong to a reply already begun.

    It has a ``prompt`` (text, continued as it is), a ``question`` (asked of a chat model), ``messages``
    (rendered by the chat template) or ``prompt_ids``. ``None`` means not given, as a dataset fills the
    columns that a record lacks.

    Raises:
        ValueError: The record has none, or the chat template rejects its messages.
    """
    given = {key: value for key, value in record.items() if value is not None}
    if "prompt_ids" in given:
        return _token_ids(given, "prompt_ids"), 0
    if isinstance(given.get("prompt"), str):
        token_ids, begin = encode(tokenizer, given["prompt"]), tokenizer.encode("")[:1]
        is_missing = begin == [tokenizer.bos_token_id] != token_ids[:1]  # the token that begins every text
        return [*begin, *token_ids] if is_missing else token_ids, 0
    if "messages" in given or isinstance(given.get("question"), str):
        if not tokenizer.chat_template:
            raise ValueError(
                'the tokenizer has no chat template: set one, or give the whole text as "prompt"'
            )
        messages = given.get("messages") or [{"role": "user", "content": given.get("question")}]
        try:
            return chat_prompt(tokenizer, make_turns(messages))
        except (TypeError, ValueError, KeyError, NotImplementedError) as error:  # of LangChain's conversion
            raise ValueError(f"the messages cannot be rendered: {error}") from error
    raise ValueError(f"there is no prompt (it has: {', '.join(given) or 'nothing'}): expected {_EXPECTED}")


def read_prompts(
    source: str | Path | Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_positions: int,
    max_tokens: int,
    vocabulary_size: int | None = None,
    limit: int | None = None,
    template: str | None = None,
) -> list[list[int]]:
    """Token ids of every prompt.

    Args:
        source: JSON lines, name or folder of a ``datasets`` dataset, or records; see :func:`record_prompt`.
        tokenizer: The model's.
        max_positions: Tokens the model has positions for.
        max_tokens: Maximum tokens of an answer.
        vocabulary_size: How many token ids the model reads; the tokenizer's unless given.
        limit: Read only the first ``limit`` prompts.
        template: A user's message in which fields of the record stand in braces, for records of another form:
            ``"{passage} {question}"``. A list of texts becomes paragraphs; ``{documents[0]}`` is one of them.

    Raises:
        FileNotFoundError: A file of JSON lines does not exist.
        ValueError: A prompt is missing, too long or unknown to the model, does not fit the template, or the
            tokenizer has no end token. The message says which record and what to do.
    """
    check_tokenizer(tokenizer)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")

    def parse(record: Mapping[str, Any]) -> list[int]:
        asked = record if template is None else {"question": _filled(template, record)}
        token_ids, _ = record_prompt(asked, tokenizer)
        check_prompt(token_ids, max_tokens, max_positions, vocabulary_size or len(tokenizer))
        return token_ids

    return _parse_records(source, limit, parse)


def read_examples(
    source: str | Path | Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_positions: int,
    vocabulary_size: int | None = None,
) -> list[tuple[list[int], list[int]]]:
    """As :func:`read_prompts`, of records with ``answer`` (text) or ``answer_ids``, too, which end there."""
    end = check_tokenizer(tokenizer)

    def parse(record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        prompt_ids, _ = record_prompt(record, tokenizer)
        if record.get("answer_ids") is not None:
            answer_ids = _token_ids(record, "answer_ids")
        elif isinstance(record.get("answer"), str):
            answer_ids = encode(tokenizer, record["answer"])
        else:
            raise ValueError('there is no answer: expected "answer" (text) or "answer_ids", too')
        if answer_ids[-1:] != [end]:
            answer_ids.append(end)
        limits = (max_positions, vocabulary_size or len(tokenizer))
        check_prompt(prompt_ids, len(answer_ids), *limits)
        check_prompt([*prompt_ids, *answer_ids], 0, *limits)
        return prompt_ids, answer_ids

    return _parse_records(source, None, parse)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the tokenizer's end token; ``ValueError`` if it has none, so that no answer would end."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end token, so answers would never end and training would include what "
            "follows them: set tokenizer.eos_token to the token that ends the model's answers"
        )
    return int(tokenizer.eos_token_id)


def _parse_records(
    source: str | Path | Iterable[Mapping[str, Any]],
    limit: int | None,
    parse: Callable[[Mapping[str, Any]], _Parsed],
) -> list[_Parsed]:
    parsed = []
    for name, record in islice(_records(source), limit):
        try:
            if not isinstance(record, Mapping):
                raise ValueError(f"expected a JSON object, got {type(record).__name__}")
            parsed.append(parse(record))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if not parsed:
        name = str(source) if isinstance(source, str | Path) else "the source"
        raise ValueError(f"{name} holds no record: expected one a line with {_EXPECTED}")
    return parsed


def _records(source: str | Path | Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if not isinstance(source, str | Path):
        return ((f"record {number}", record) for number, record in enumerate(source, 1))
    source = os.path.expanduser(source)
    if Path(source).suffix in (".jsonl", ".json", ".ndjson"):
        if not Path(source).exists():
            raise FileNotFoundError(f"{source} does not exist: give a file of JSON lines with {_EXPECTED}")
        return ((line.name, line.record()) for line in read_lines(Path(source)))
    from datasets import load_dataset, load_from_disk

    is_saved = (Path(source) / "dataset_info.json").exists() or (Path(source) / "state.json").exists()
    dataset = load_from_disk(source) if is_saved else load_dataset(source, split="train")
    return ((f"record {number} of {source}", record) for number, record in enumerate(dataset, 1))


class _Paragraphs(list[object]):
    """A list that a template writes as paragraphs."""

    def __format__(self, spec: str) -> str:
        return format("\n\n".join(map(str, self)), spec)


def _filled(template: str, record: Mapping[str, Any]) -> str:
    fields = {key: _Paragraphs(value) if isinstance(value, list) else value for key, value in record.items()}
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the template {template!r} does not fit ({type(error).__name__}: {error}): the record has "
            f"{', '.join(fields) or 'no fields'}. Fields stand in braces; a brace itself is doubled"
        ) from error


def _token_ids(record: Mapping[str, Any], key: str) -> list[int]:
    value = record[key]
    if isinstance(value, Sequence) and all(type(token) is int for token in value):
        return list(value)
    raise ValueError(f'"{key}" is not a list of token ids: got {str(value)[:60]}')
