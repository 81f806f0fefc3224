"""A peer's process and its children, which are stopped while it is not their turn.

Knows processes of Linux. Does not know what they compute.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile


class PeerProcess:
    """A running process in a session of its own.

    Args:
        command: Program and arguments.
        environment: Variables beside this process's own.
        replies: Whether what it writes is read; otherwise it goes to the log, as its errors do.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, replies: bool = False
    ) -> None:
        self._log = TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[1],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if replies else self._log,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the processes run."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def ask(self, request: str) -> str:
        """Write a line and read one.

        Raises:
            RuntimeError: The process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self.turn():
            try:
                print(request, file=self._process.stdin, flush=True)
                reply = self._process.stdout.readline()
            except BrokenPipeError:
                reply = ""
        if not reply:
            raise RuntimeError(f"the process has ended: {self.last_words()}")
        return reply

    @property
    def has_ended(self) -> bool:
        """Whether the first of the processes has ended."""
        return self._process.poll() is not None

    def last_words(self) -> str:
        """The end of what the processes wrote as errors."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-1000:]

    def resident_bytes(self) -> int:
        """Memory of all the processes; what they share counts once."""
        kib = 0
        for folder in self._folders():
            with suppress(OSError):  # it has ended since
                lines = (folder / "smaps_rollup").read_text("ascii").splitlines()
                kib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return kib * 1024

    def states(self) -> list[str]:
        """A letter for each process, as ``ps`` shows it: ``T`` is stopped."""
        found = []
        for folder in self._folders():
            with suppress(OSError):
                found.append((folder / "stat").read_text("utf-8").rpartition(")")[2].split()[0])
        return found

    def close(self) -> None:
        """End the processes."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _signal(self, number: int) -> None:
        for folder in self._folders():
            with suppress(OSError):
                os.kill(int(folder.name), number)

    def _folders(self) -> list[Path]:
        """Where Linux tells of each process of the session."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.getsid(int(folder.name)) == self._process.pid:
                    found.append(folder)
        return found
