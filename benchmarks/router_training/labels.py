"""Files of labelled questions: one JSON object per line with ``question`` and ``use_sot``.

The shipped questions were written for this project; ``questions/README.md`` states the rule for their labels.
Knows files and labels, not routers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from local_backend.offline.jsonl import JsonLine, read_lines

QUESTIONS = Path(__file__).parent / "questions"
TRAINING = (QUESTIONS / "english.jsonl", QUESTIONS / "chinese.jsonl")
HELD_OUT_CHINESE = QUESTIONS / "chinese_held_out.jsonl"


@dataclass(frozen=True, slots=True)
class LabelledQuestion:
    """A question and whether it suits Skeleton-of-Thought.

    Attributes:
        question: As a user would send it.
        use_sot: Whether a good answer is a list of points that can be written independently.
        genre: What kind of question it is, possibly empty.
    """

    question: str
    use_sot: bool
    genre: str = ""


def read_labels(paths: Iterable[Path | str]) -> list[LabelledQuestion]:
    """Reads label files.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A line is malformed; the message names file and line.
    """
    return [_labelled(line) for path in paths for line in read_lines(Path(path))]


def _labelled(line: JsonLine) -> LabelledQuestion:
    fields = line.record()
    try:
        question, label = fields["question"], fields["use_sot"]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f'{line.name}: expected {{"question": "...", "use_sot": 0 or 1}}, got {fields!r:.120}'
        ) from error
    if not isinstance(question, str) or not question.strip() or label not in (0, 1):
        raise ValueError(
            f"{line.name}: expected a question with text and use_sot 0 or 1, got {fields!r:.120}"
        )
    return LabelledQuestion(question, bool(label), str(fields.get("genre", "")))
