"""Reads files of JSON lines: lines end at line feeds alone, and one that cannot be read harms no other.

A string may hold what ``str.splitlines`` takes for ends of lines, such as U+2028. A byte order mark is
skipped.
Knows files. Does not know what the records mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class JsonLine:
    """A line that is not empty.

    Attributes:
        path: Its file.
        number: Its number in the file, from 1.
        content: Its bytes.
    """

    path: Path
    number: int
    content: bytes

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"line {self.number} of {self.path}"

    def record(self) -> Any:
        """What the line says.

        Raises:
            ValueError: It is not JSON in UTF-8; the message names the line.
        """
        try:
            return json.loads(self.content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.name} is not JSON ({error})") from error


def read_lines(path: Path) -> Iterator[JsonLine]:
    """The lines of a file of JSON lines.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        for number, content in enumerate(file, 1):
            if content.decode("utf-8-sig", "replace").strip():
                yield JsonLine(path, number, content)
