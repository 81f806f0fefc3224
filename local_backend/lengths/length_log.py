"""A log of prompts and answer lengths, as JSON lines: written as answers end, read to train and evaluate.

A line has ``prompt`` (text), ``messages`` or ``prompt_ids``, and ``num_tokens``. Knows files and tokenizers.
Does not know models.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from local_backend.offline.prompt_file import json_lines, read_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from local_backend.sequences.sampling import SamplingParams

_NO_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class LengthExample:
    """A prompt and the length of one answer to it.

    Attributes:
        prompt_ids: Its token ids.
        num_tokens: Tokens of the answer, the end token included.
    """

    prompt_ids: tuple[int, ...]
    num_tokens: int


class LengthLog:
    """Appends one line for each answer; thread-safe.

    Args:
        path: The file; created if it does not exist, otherwise appended to.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def add(
        self, prompt_ids: Sequence[int], num_tokens: int, params: SamplingParams | None = None, **more: Any
    ) -> None:
        """Write one line and flush it.

        Args:
            prompt_ids: Token ids of the prompt.
            num_tokens: Tokens of the answer. Do not log cancelled answers: their full length is unknown.
            params: How it was sampled; temperature and ``max_tokens`` are logged.
            more: Further JSON values to log, e.g. the kind of request.

        Raises:
            ValueError: The log is closed.
        """
        record: dict[str, Any] = {"prompt_ids": list(prompt_ids), "num_tokens": num_tokens, **more}
        if params is not None:
            record |= {"temperature": params.temperature, "max_tokens": params.max_tokens}
        line = json.dumps(record, ensure_ascii=False) + "\n"
        with self._lock:
            if self._file.closed:
                raise ValueError(f"the log {self.path} is closed: open another LengthLog to go on")
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Close the file; adding then raises."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> LengthLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lengths(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[LengthExample]:
    """Every prompt with its answer's length, in file order; a truncated last line is skipped.

    Args:
        path: JSON lines; see the module.
        tokenizer: Of the model that answered.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds no example, or a line is invalid. Says which and what to do.
    """
    records = []
    for name, record in json_lines(Path(path), is_growing=True):
        length = record.get("num_tokens") if isinstance(record, dict) else None
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError(
                f'{name} has no "num_tokens" of at least 1 (got {length!r}): '
                "give the number of tokens of its answer"
            )
        records.append(record)
    if not records:
        raise ValueError(f"{path} holds no example: expected one record a line with a prompt and num_tokens")
    prompts = read_prompts(records, tokenizer, max_positions=_NO_LIMIT, max_tokens=0)
    return [
        LengthExample(tuple(prompt), record["num_tokens"])
        for prompt, record in zip(prompts, records, strict=True)
    ]
