"""Questions, and the answers and judgements that are kept between runs."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        text: As a user would send it.
        category: What figures are broken down by.
        name: Tells it from the others in tables.
    """

    text: str
    category: str
    name: str


def read_questions(path: Path | str) -> list[Question]:
    """Reads a file of questions; those without a category are of the category ``"all"``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line has another form, or there is no question. The text names the line.
    """
    questions = []
    for number, line in enumerate(Path(path).read_text("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            text = fields["question"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}, line {number}: expected {{"question": "..."}}, got {line!r:.120}'
            ) from error
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{path}, line {number}: the question has no text")
        questions.append(Question(text, str(fields.get("category") or "all"), str(fields.get("id", number))))
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return questions


class Store:
    """JSON values by key, in one file.

    Args:
        path: Made if it is not there.

    Raises:
        ValueError: The file is something else.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(path, isolation_level=None)
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
            )
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise ValueError(f"{path} is not a store of an evaluation: {error}") from error

    def get(self, key: str) -> Any | None:
        """What was put under ``key``, ``None`` if nothing was."""
        row = self._connection.execute("SELECT value FROM kept WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, value: Any) -> None:
        """Keeps ``value``; it is on disk when this returns."""
        self._connection.execute(
            "INSERT OR REPLACE INTO kept VALUES (?, ?)", (key, json.dumps(value, ensure_ascii=False))
        )

    def __len__(self) -> int:
        (count,) = self._connection.execute("SELECT COUNT(*) FROM kept").fetchone()
        return int(count)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()


def key_of(**asked: Any) -> str:
    """The key of whatever is asked: the same for the same, of no length to speak of."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
