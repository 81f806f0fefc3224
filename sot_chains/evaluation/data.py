"""Questions, and the store that keeps answers and judgements between runs."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        text: As a user would send it.
        category: Results are grouped by it.
        name: Identifies the question in tables.
    """

    text: str
    category: str
    name: str


def read_questions(path: Path | str) -> list[Question]:
    """Reads a JSON Lines file of questions; the category is ``"all"`` where it is missing.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is malformed (the message names it), or there is no question.
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
    """A key-value store of JSON values in one SQLite file.

    Args:
        path: Created if it does not exist.

    Raises:
        ValueError: The file is not such a store.
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
        """The value stored under ``key``; ``None`` if there is none."""
        row = self._connection.execute("SELECT value FROM kept WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, value: Any) -> None:
        """Stores ``value``; it is on disk when this returns."""
        self._connection.execute(
            "INSERT OR REPLACE INTO kept VALUES (?, ?)", (key, json.dumps(value, ensure_ascii=False))
        )

    def __len__(self) -> int:
        (count,) = self._connection.execute("SELECT COUNT(*) FROM kept").fetchone()
        return int(count)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()


def key_of(**asked: Any) -> str:
    """A short key, equal for equal arguments."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
