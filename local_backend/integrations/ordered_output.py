"""The output of a long run: lines in the order of the input, none lost or doubled whenever it is killed.

Rows end in any order. A line whose turn has come is appended to the output; one that is early is appended to
a journal beside it (``OUT.journal``), which is cleared of what has come into the output, and removed at the
end. Lines are appended whole and reach the disk before :meth:`OrderedOutput.add` returns, so a kill leaves at
most one line without an end, in either file, and it is cut off when the run is taken up. Knows files and line
numbers. Does not know what the lines say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_BLOCK_BYTES = 2**16
# A journal is rewritten when it is larger than this and holds mostly what is in the output by now.
_LARGE_JOURNAL_BYTES = 2**20


class OrderedOutput:
    """An output file, taken up where it was left.

    Args:
        path: The output; made where it does not exist.
        settings: What the lines depend on beside the input; a run is taken up with the same only.

    Attributes:
        num_written: Lines in the output.

    Raises:
        ValueError: The output was begun with other settings, or by somebody else.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.journal_path = path.with_name(path.name + ".journal")
        header = json.dumps({"settings": dict(settings)}, ensure_ascii=False, sort_keys=True) + "\n"
        self._early: dict[int, str] = {}
        self._header = header.encode()
        # A journal is there before its output, so that a line cut short without one is somebody else's.
        if path.exists() and not self.journal_path.exists() and not _ends_whole(path):
            raise ValueError(f"{path} is no output of an earlier run: name another, or remove it")
        with self.journal_path.open("ab"):
            _cut_last_line(self.journal_path)
        self._read_journal()
        self._journal = self.journal_path.open("a+b", buffering=0)
        self._file = path.open("ab", buffering=0)
        self.num_written = _cut_last_line(path)
        self._early = {number: line for number, line in self._early.items() if number >= self.num_written}
        self._append_what_is_due()

    def __contains__(self, number: object) -> bool:
        """Whether the line with this number, 0 for the first, is there already."""
        return isinstance(number, int) and (number < self.num_written or number in self._early)

    @property
    def num_done(self) -> int:
        """Lines that are there, those that wait for their turn included."""
        return self.num_written + len(self._early)

    def add(self, lines: Mapping[int, str]) -> None:
        """Keep lines, by number; when this returns they are on the disk.

        Raises:
            ValueError: One is there already.
        """
        if twice := [number for number in lines if number in self]:
            raise ValueError(f"line {twice[0]} is there already")
        self._early.update(lines)
        due = self._due()
        _append(self._journal, _entries({n: line for n, line in lines.items() if n not in due}))
        self._append_what_is_due()

    def finish(self) -> None:
        """Remove the journal: every line is in the output.

        Raises:
            ValueError: One is missing.
        """
        if self._early:
            raise ValueError(f"line {self.num_written} is missing, but later ones are there")
        self.close()
        self.journal_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close both files; the run can be taken up."""
        self._file.close()
        self._journal.close()

    def __enter__(self) -> OrderedOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _due(self) -> range:
        last = self.num_written
        while last in self._early:
            last += 1
        return range(self.num_written, last)

    def _append_what_is_due(self) -> None:
        due = self._due()
        if due:
            _append(self._file, "".join(self._early.pop(number) for number in due).encode())
            self.num_written = due.stop
        size = self._journal.seek(0, os.SEEK_END)
        if not self._early and size > len(self._header):
            self._journal.truncate(len(self._header))
            os.fsync(self._journal.fileno())
        elif size > _LARGE_JOURNAL_BYTES and size > 4 * sum(map(len, self._early.values())):
            self._rewrite_journal()

    def _rewrite_journal(self) -> None:
        new_path = self.journal_path.with_name(self.journal_path.name + ".new")
        with new_path.open("wb", buffering=0) as file:
            _append(file, self._header + _entries(self._early))
        self._journal.close()
        new_path.replace(self.journal_path)
        _sync_folder(self.journal_path.parent)
        self._journal = self.journal_path.open("a+b", buffering=0)

    def _read_journal(self) -> None:
        lines = self.journal_path.read_bytes().splitlines(keepends=True)
        if not lines:
            with self.journal_path.open("ab", buffering=0) as file:
                _append(file, self._header)
            _sync_folder(self.journal_path.parent)
            return
        if lines[0] != self._header:
            raise ValueError(
                f"{self.path} was begun with {lines[0].decode().strip()}, and not with "
                f"{self._header.decode().strip()}: give the same settings, or remove {self.path} and "
                f"{self.journal_path}"
            )
        for line in lines[1:]:
            entry = json.loads(line)
            self._early[entry["number"]] = entry["line"]


def _entries(lines: Mapping[int, str]) -> bytes:
    """What the journal says of lines."""
    entries = ({"number": number, "line": line} for number, line in lines.items())
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()


def _append(file: Any, content: bytes) -> None:
    if not content:
        return
    while content:
        content = content[file.write(content) :]
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Let the name of a new file outlive a power failure; where folders cannot be opened, do without."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ends_whole(path: Path) -> bool:
    """Whether a file is empty or ends with a line break."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _cut_last_line(path: Path) -> int:
    """Cut off what follows the last line break; returns the number of lines."""
    num_lines = end = 0
    with path.open("r+b") as file:
        place = 0
        while block := file.read(_BLOCK_BYTES):
            num_lines += block.count(b"\n")
            if (last := block.rfind(b"\n")) >= 0:
                end = place + last + 1
            place += len(block)
        if end != place:
            file.truncate(end)
    return num_lines
