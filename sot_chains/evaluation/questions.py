"""Files of questions to evaluate with: one JSON object a line with ``question`` and perhaps ``category``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


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
