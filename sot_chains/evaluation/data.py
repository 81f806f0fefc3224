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
        error: Why it cannot be asked; empty if it can.
    """

    text: str
    category: str
    name: str
    error: str = ""


def read_questions(path: Path | str) -> list[Question]:
    """Reads a JSON Lines file of questions; the category is ``"all"`` where it is missing.

    A damaged line, which is not JSON in UTF-8, becomes a question with an error. Lines end at line feeds
    alone, and a byte order mark is skipped.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is JSON of another form, every line is damaged (the message names the first), or
            there is no question.
    """
    questions = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        place = f"{path}, line {number}"
        try:
            if not (content := line.decode("utf-8-sig").strip()):
                continue
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            questions.append(Question("", "all", str(number), f"{place} is not JSON in UTF-8: {error}"))
            continue
        try:
            text = fields["question"]
        except (KeyError, TypeError) as error:
            raise ValueError(f'{place}: expected {{"question": "..."}}, got {content!r:.120}') from error
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{place}: the question has no text")
        named = (text, fields.get("category") or "all", fields.get("id", number))
        questions.append(Question(*map(_without_surrogates, named)))
    if not questions:
        raise ValueError(f"{path} holds no questions")
    if all(question.error for question in questions):
        raise ValueError(questions[0].error)
    return questions


def _without_surrogates(value: Any) -> str:
    """``value`` as text, with lone surrogates replaced: they could be neither stored nor reported."""
    return str(value).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


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
