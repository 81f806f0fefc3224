"""Questions, and the store that keeps answers and judgements between runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Question:
    """One question."""

    text: str  # as a user would send it
    category: str  # results are grouped by it
    name: str  # identifies the question in tables


def read_questions(path: Path | str) -> list[Question]:
    """Reads a JSON Lines file of questions; the category is ``"all"`` where it is missing.

    Lines end at line feeds alone, and a byte order mark is skipped.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not of this form (the message names it), or there is no question.
    """
    questions = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        try:
            if not (content := line.decode("utf-8-sig").strip()):
                continue
            fields = json.loads(content)
            text = fields["question"]
            if not text.strip():
                raise ValueError("the question has no text")
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            expected = 'expected {"question": "...", "category": "..."} in UTF-8'
            raise ValueError(f"{path}, line {number}: {expected}: {error}") from error
        named = (text, fields.get("category") or "all", fields.get("id", number))
        questions.append(Question(*map(_without_surrogates, named)))
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return questions


def _without_surrogates(value: Any) -> str:
    """``value`` as text, with lone surrogates replaced: they could be neither sent nor reported."""
    return str(value).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Store:
    """JSON values by key, in a file of JSON lines that is only appended to.

    Args:
        path: Created if it does not exist.

    Raises:
        ValueError: The file is not such a store.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        *lines, torn = self._file.read().split(b"\n")
        try:
            if not torn.startswith(_LINE_START[: len(torn)]):
                raise ValueError("the last line does not end")
            self._values = {kept["key"]: kept["value"] for kept in map(json.loads, lines)}
        except (ValueError, TypeError, KeyError) as error:
            self._file.close()
            raise ValueError(f"{path} is not a store of an evaluation: {error!r}") from error
        if torn:  # the process was killed while it wrote this line
            self._file.truncate(self._file.tell() - len(torn))

    def get(self, key: str) -> Any | None:
        """The value stored under ``key``; ``None`` if there is none."""
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Stores ``value``; it outlives the process once this returns."""
        self._values[key] = value
        self._file.write(json.dumps({"key": key, "value": value}).encode() + b"\n")
        self._file.flush()

    def __len__(self) -> int:
        return len(self._values)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


_LINE_START = b'{"key": '


def make_key(**asked: Any) -> str:
    """A short key, equal for equal arguments."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
