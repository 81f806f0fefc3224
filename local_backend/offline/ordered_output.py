"""The output of a long run: lines in the order of the input, none lost or doubled whenever it is killed.

Rows end in any order. Finished lines are kept in an SQLite file beside the output (``OUT.partial``); when all
are there, they are written in order and the file is removed. Knows files and line numbers. Does not know what
the lines say.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class OrderedOutput:
    """An output file that is written when all of its lines are there; an interrupted run is resumed.

    Args:
        path: The output; it must not exist.
        settings: What the lines depend on; a run is resumed with the same settings only.

    Attributes:
        num_done: Lines that are there.

    Raises:
        ValueError: The output exists, the run to be resumed was begun with other settings, or another
            process is at it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.partial_path = path.with_name(path.name + ".partial")
        if path.exists() and not self.partial_path.exists():
            raise ValueError(
                f"{path} exists and is not an interrupted run: name another output, or remove it"
            )
        self._database = sqlite3.connect(self.partial_path, timeout=1.0)
        try:
            self._resume(json.dumps(dict(settings), ensure_ascii=False, sort_keys=True))
        except BaseException:
            self.close()
            raise

    def _resume(self, settings: str) -> None:
        try:
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            with self._database as database:
                database.execute("CREATE TABLE IF NOT EXISTS run (settings TEXT NOT NULL)")
                database.execute("CREATE TABLE IF NOT EXISTS lines (number INTEGER PRIMARY KEY, text TEXT)")
                begun = database.execute("SELECT settings FROM run").fetchone()
                if begun is None:
                    database.execute("INSERT INTO run VALUES (?)", (settings,))
            self.num_done: int = self._database.execute("SELECT count(*) FROM lines").fetchone()[0]
        except sqlite3.OperationalError as error:
            raise ValueError(f"{self.partial_path} is in use ({error}): is another run at it?") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"{self.partial_path} is not of an interrupted run ({error}): remove it"
            ) from error
        if begun is not None and begun[0] != settings:
            raise ValueError(
                f"{self.path} was begun with {begun[0]}, and not with {settings}: use the same settings and "
                f"input, or remove {self.partial_path}"
            )

    def __contains__(self, number: object) -> bool:
        """Whether the line with this number, 0 for the first, is there already."""
        found = self._database.execute("SELECT 1 FROM lines WHERE number = ?", (number,))
        return found.fetchone() is not None

    def add(self, lines: Mapping[int, str]) -> None:
        """Stores lines by number; when this returns they are on the disk.

        Raises:
            ValueError: One is there already; none was stored.
        """
        try:
            with self._database as database:
                database.executemany("INSERT INTO lines VALUES (?, ?)", lines.items())
        except sqlite3.IntegrityError:
            twice = next(number for number in lines if number in self)
            raise ValueError(f"line {twice} is there already") from None
        self.num_done += len(lines)

    def finish(self, num_lines: int) -> None:
        """Writes the output of ``num_lines`` lines and removes the partial file.

        Raises:
            ValueError: A line is missing.
        """
        if self.num_done != num_lines:
            raise ValueError(f"{num_lines - self.num_done} of {num_lines} lines are missing")
        written_path = self.path.with_name(self.path.name + ".new")
        with written_path.open("w", encoding="utf-8", newline="") as file:
            lines = self._database.execute("SELECT number, text FROM lines ORDER BY number")
            file.writelines(text for _, text in lines)
            file.flush()
            os.fsync(file.fileno())
        written_path.replace(self.path)
        self.close()
        self.partial_path.unlink()

    def close(self) -> None:
        """Closes the partial file; the run can be resumed."""
        self._database.close()

    def __enter__(self) -> OrderedOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
