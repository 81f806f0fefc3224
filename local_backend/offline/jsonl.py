"""Files of JSON lines: read line by line, and written by runs that can be killed and resumed.

Lines end at line feeds alone: a string may hold what ``str.splitlines`` takes for the end of a line, such as
U+2028. A byte order mark is skipped. Knows files. Does not know what the records mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class JsonLine:
    """A line that is not empty: its file, its number there from 1, and its bytes."""

    path: Path
    number: int
    content: bytes

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"line {self.number} of {self.path}"

    def record(self) -> Any:
        """The parsed JSON; a ``ValueError`` names a line that is not JSON in UTF-8."""
        try:
            return json.loads(self.content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.name} is not JSON ({error})") from error


def read_lines(path: Path) -> Iterator[JsonLine]:
    """The lines of a file of JSON lines."""
    with path.expanduser().open("rb") as file:
        for number, content in enumerate(file, 1):
            if content.decode("utf-8-sig", "replace").strip():
                yield JsonLine(path, number, content)


class ResumableOutput(AbstractContextManager["ResumableOutput"]):
    """The output file of a long run: none of its lines is lost or written twice when the run is killed.

    Records are appended in any order to ``OUT.partial``, whose first line holds the run's settings; it is
    resumed with the same settings only. :meth:`finish` writes the output in the order of the input.

    Raises:
        ValueError: The output exists, the interrupted run had other settings, or another process is writing.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.partial_path = path.with_name(path.name + ".partial")
        self._offsets: dict[int, int] = {}  # where the record of each input line begins
        if path.exists() and not self.partial_path.exists():
            raise ValueError(
                f"{path} exists and is not an interrupted run: name another output, or remove it"
            )
        self._file = self.partial_path.open("a+b")
        try:
            self._resume(_encode({"settings": dict(settings)}))
        except BaseException:
            self._file.close()
            raise

    def _resume(self, header: bytes) -> None:
        with suppress(ImportError):  # on Windows
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{self.partial_path} is in use: is another run writing it?") from error
        self._file.seek(0)
        first = self._file.readline()
        if not first.startswith(b'{"settings": ') and not header.startswith(first):
            raise ValueError(f"{self.partial_path} does not belong to an interrupted run: remove it")
        if first.endswith(b"\n") and first != header:
            raise ValueError(
                f"{self.path} was begun with {first.decode().strip()}, not with {header.decode().strip()}: "
                f"use the same settings and input, or remove {self.partial_path}"
            )
        end = len(first) if first == header else 0
        for number, content in enumerate(self._file, 2):
            if content.endswith(b"\n"):  # else the run was killed while it wrote this line
                self._offsets[JsonLine(self.partial_path, number, content).record()["line"]] = end
                end += len(content)
        self._file.truncate(end)
        if not end:
            self._append(header)

    @property
    def num_done(self) -> int:
        """How many records there are."""
        return len(self._offsets)

    def __contains__(self, line: JsonLine) -> bool:
        """Whether there is a record for a line of the input."""
        return line.number in self._offsets

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record, whose ``line`` is its line's number in the input."""
        self._offsets[record["line"]] = self._append(_encode(record))

    def _append(self, content: bytes) -> int:
        self._file.seek(0, os.SEEK_END)
        offset = self._file.tell()
        self._file.write(content)
        self._file.flush()
        return offset

    def finish(self) -> None:
        """Write the output in the order of the input, and remove the partial file."""
        written_path = self.path.with_name(self.path.name + ".new")
        with written_path.open("wb") as file:
            for _, offset in sorted(self._offsets.items()):
                self._file.seek(offset)
                file.write(self._file.readline())
            file.flush()
            os.fsync(file.fileno())
        written_path.replace(self.path)
        self._file.close()
        self.partial_path.unlink()

    def __exit__(self, *_: object) -> None:  # the run can be resumed, once any of it is done
        self._file.close()
        if not self._offsets:
            self.partial_path.unlink(missing_ok=True)


def _encode(record: Mapping[str, Any]) -> bytes:
    # A lone surrogate becomes its JSON escape.
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
