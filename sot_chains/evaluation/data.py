"""Questions, and the store that keeps answers and judgements between runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sot_chains.prompts.conversation import without_surrogates


@dataclass(frozen=True, slots=True)
class Question:
    """One question."""

    text: str  # as a user would send it
    category: str  # results are grouped by it
    name: str  # identifies the question in tables


def read_questions(path: Path | str) -> list[Question]:
    """Reads a JSON Lines file of questions; the category is ``"all"`` where it is missing."""
    questions = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        try:
            if not (content := line.decode("utf-8-sig").strip()):
                continue
            fields = without_surrogates(json.loads(content))
            text = fields["question"]
            if not text.strip():
                raise ValueError("the question has no text")
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            expected = 'expected {"question": "...", "category": "..."} in UTF-8'
            raise ValueError(f"{path}, line {number}: {expected}: {error}") from error
        questions.append(Question(text, str(fields.get("category") or "all"), str(fields.get("id", number))))
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return questions


class Store:
    """Results by what was asked, in a file of JSON lines that is only appended to."""

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

    async def get_or_make(self, make: Callable[[], Awaitable[Any]], **asked: Any) -> Any:
        """The stored result of ``asked``. If there is none, that of ``make`` is stored, unless it raises."""
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        if key not in self._values:
            self._values[key] = await make()
            self._file.write(json.dumps({"key": key, "value": self._values[key]}).encode() + b"\n")
            self._file.flush()
        return self._values[key]

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


_LINE_START = b'{"key": '
