"""Reads prompts from JSON lines or a dataset, as token ids, and checks them before any work is done.

Knows tokenizers. Of a model it knows only the numbers of positions and token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from local_backend.offline.jsonl import read_lines
from local_backend.sequences.outputs import Trajectory
from local_backend.sequences.tokenizing import encode, encode_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EXPECTED = (
    'a "prompt" (text), "question", "messages" (a list of {"role", "content"}) or "prompt_ids" '
    "(a list of token ids)"
)


def read_prompts(
    source: str | Path | Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_positions: int,
    max_tokens: int,
    vocabulary_size: int | None = None,
    split: str = "train",
    limit: int | None = None,
    template: str | None = None,
) -> list[list[int]]:
    """Token ids of every prompt.

    Args:
        source: A file of JSON lines, the name or folder of a ``datasets`` dataset, or records. A record has
            a ``prompt`` (text, continued as it is), a ``question`` (asked of a chat model), ``messages``
            (rendered by the chat template) or ``prompt_ids``.
        tokenizer: The model's.
        max_positions: Tokens the model has positions for.
        max_tokens: Maximum tokens of an answer.
        vocabulary_size: How many token ids the model reads; the tokenizer's unless given.
        split: Which split of a dataset to read.
        limit: Read only the first ``limit`` prompts.
        template: A user's message in which fields of the record stand in braces, for records of any other
            form: ``"{passage} {question}"``. A list of texts becomes paragraphs; ``{documents[0]}`` is one of
            them.

    Raises:
        FileNotFoundError: A file of JSON lines does not exist.
        ValueError: There is no prompt, a record has none or lacks a field of the template, the tokenizer
            lacks an end token or a chat template that is needed, a prompt leaves no room for its answer or
            contains token ids unknown to the model, or the limit is less than 1. The message says which
            record and what to do.
    """
    check_tokenizer(tokenizer)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    prompts: list[list[int]] = []
    for name, record in _records(source, split):
        if limit is not None and len(prompts) >= limit:
            break
        asked = record if template is None else {"question": _filled(template, name, record)}
        token_ids = _token_ids(name, asked, tokenizer)
        _check_ids(name, token_ids, vocabulary_size or len(tokenizer))
        if not token_ids:
            raise ValueError(f"{name} has an empty prompt: give at least one token")
        if len(token_ids) + max_tokens > max_positions:
            raise ValueError(
                f"{name} has a prompt of {len(token_ids)} tokens, which with an answer of up to {max_tokens} "
                f"exceeds the model's {max_positions} positions: shorten or remove it, or lower max_tokens"
            )
        prompts.append(token_ids)
    if not prompts:
        raise ValueError(f"{_name_of(source)} holds no prompt: expected one record a line with {_EXPECTED}")
    return prompts


def read_examples(
    source: str | Path | Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_positions: int,
    vocabulary_size: int | None = None,
    split: str = "train",
) -> list[Trajectory]:
    """Read prompts with answers, as trajectories without iterates; each answer ends with the end token.

    Args:
        source: As for :func:`read_prompts`; a record also has an ``answer`` (text) or ``answer_ids``.
        tokenizer: The model's.
        max_positions: Tokens the model has positions for.
        vocabulary_size: How many token ids the model reads; the tokenizer's unless given.
        split: Which split of a dataset to read.

    Raises:
        FileNotFoundError: A file of JSON lines does not exist.
        ValueError: There is no example, a record is not one, is too long or contains token ids unknown to the
            model, or the tokenizer has no end token.
    """
    end = check_tokenizer(tokenizer)
    examples: list[Trajectory] = []
    for name, record in _records(source, split):
        prompt_ids = _token_ids(name, record, tokenizer)
        if record.get("answer_ids") is not None:
            answer_ids = _ids(name, "answer_ids", record["answer_ids"])
        elif isinstance(record.get("answer"), str):
            answer_ids = encode(tokenizer, record["answer"])
        else:
            raise ValueError(f'{name} has no answer: expected "answer" (text) or "answer_ids", too')
        if answer_ids[-1:] != [end]:
            answer_ids.append(end)
        _check_ids(name, [*prompt_ids, *answer_ids], vocabulary_size or len(tokenizer))
        if not prompt_ids or len(prompt_ids) + len(answer_ids) > max_positions:
            raise ValueError(
                f"{name} has {len(prompt_ids)} tokens of prompt and {len(answer_ids)} of answer: give at "
                f"least one and at most the model's {max_positions} together"
            )
        examples.append(Trajectory(tuple(prompt_ids), tuple(answer_ids)))
    if not examples:
        raise ValueError(f"{_name_of(source)} holds no example: expected one record a line")
    return examples


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the tokenizer's end token.

    Raises:
        ValueError: It has none, so no answer would ever end.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end token, so answers would never end and training would include what "
            "follows them: set tokenizer.eos_token to the token that ends the model's answers"
        )
    return int(tokenizer.eos_token_id)


def _records(
    source: str | Path | Iterable[Mapping[str, Any]], split: str
) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if not isinstance(source, str | Path):
        return ((f"record {number}", record) for number, record in enumerate(source, 1))
    if Path(source).suffix in (".jsonl", ".json", ".ndjson"):
        return json_lines(Path(source))
    from datasets import load_dataset, load_from_disk

    is_saved = (Path(source) / "dataset_info.json").exists() or (Path(source) / "state.json").exists()
    dataset = load_from_disk(str(source)) if is_saved else load_dataset(str(source), split=split)
    return ((f"record {number} of {source}", record) for number, record in enumerate(dataset, 1))


def json_lines(path: Path, *, is_growing: bool = False) -> Iterator[tuple[str, Any]]:
    """The name and the record of each line that is not empty.

    Args:
        path: A file of JSON lines.
        is_growing: Whether its writer may have been stopped, or be writing still: a last line that is cut
            off is skipped.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not JSON.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give a file of JSON lines with {_EXPECTED}")
    for line in read_lines(path):
        try:
            record = line.record()
        except ValueError as error:
            if is_growing and not line.content.endswith(b"\n"):
                return
            raise ValueError(f"{error}: expected {_EXPECTED}") from error
        yield line.name, record


def _token_ids(name: str, record: object, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if isinstance(record, Mapping):
        # A dataset fills columns that a record lacks with None.
        if record.get("prompt_ids") is not None:
            return _ids(name, "prompt_ids", record["prompt_ids"])
        if isinstance(record.get("prompt"), str):
            return encode(tokenizer, record["prompt"])
        turns = record.get("messages")
        if turns is None and isinstance(record.get("question"), str):
            turns = [{"role": "user", "content": record["question"]}]
        if turns is not None:
            if not tokenizer.chat_template:
                raise ValueError(
                    f"{name} has messages or a question, but the tokenizer has no chat template: set one, or "
                    'give the whole text as "prompt"'
                )
            try:
                return encode_chat(tokenizer, turns, add_generation_prompt=True)
            except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"{name} has messages that the chat template rejects ({error}): expected a list of "
                    '{"role", "content"} as the model was trained on'
                ) from error
    keys = ", ".join(record) if isinstance(record, Mapping) else type(record).__name__
    raise ValueError(f"{name} has no prompt (it has: {keys}): expected {_EXPECTED}")


class _Paragraphs(list[object]):
    """A list that a template writes as paragraphs."""

    def __format__(self, spec: str) -> str:
        return format("\n\n".join(map(str, self)), spec)


def _filled(template: str, name: str, record: object) -> str:
    fields = dict(record) if isinstance(record, Mapping) else {}
    try:
        return template.format_map(
            {key: _Paragraphs(value) if isinstance(value, list) else value for key, value in fields.items()}
        )
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        known = ", ".join(map(str, fields)) or "no fields"
        raise ValueError(
            f"{name} does not fit the template {template!r} ({type(error).__name__}: {error}): the record "
            f"has {known}. Fields stand in braces; a brace itself is doubled"
        ) from error


def _ids(name: str, key: str, value: object) -> list[int]:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        token_ids = [token for token in value if isinstance(token, int) and not isinstance(token, bool)]
        if len(token_ids) == len(value):
            return token_ids
    raise ValueError(f'{name} has "{key}" that is not a list of token ids: got {str(value)[:60]}')


def _check_ids(name: str, token_ids: Sequence[int], vocabulary_size: int) -> None:
    wrong = [token for token in token_ids if not 0 <= token < vocabulary_size]
    if wrong:
        raise ValueError(
            f"{name} has the token id {wrong[0]}, but the model knows 0 to {vocabulary_size - 1}: was "
            "it made with another tokenizer?"
        )


def _name_of(source: object) -> str:
    return str(source) if isinstance(source, str | Path) else "the source"
