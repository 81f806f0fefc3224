"""Offline generation: lines through the engine, a bounded number at a time, in order.

Knows lines, rows and their updates. Does not know models, or how an output survives a kill.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from local_backend.engine.engine import Engine
from local_backend.langchain.chat_format import PARAMETERS, chat_prompt, text_of
from local_backend.offline.jsonl import JsonLine, read_lines
from local_backend.sequences.outputs import Update
from local_backend.sequences.sampling import SamplingParams
from local_backend.sequences.sequence import Row
from local_backend.sequences.tokenizing import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_EXPECTED = (
    'a "prompt" (text, which is continued as it is), "messages" (a list of {"role", "content"}, which are '
    'answered) or "prompt_ids" (a list of token ids)'
)
_PARAMETERS = (*PARAMETERS, "stop")


def row_arguments(
    record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, defaults: SamplingParams, *, seed: int
) -> dict[str, Any]:
    """The arguments of :meth:`~local_backend.Engine.make_row` for a line; unknown keys are ignored.

    Args:
        record: A ``prompt``, ``messages`` or ``prompt_ids``; optionally ``references``, ``max_tokens``,
            ``temperature``, ``top_p``, ``top_k``, ``min_p``, the penalties, ``seed`` and ``stop``.
        tokenizer: The model's.
        defaults: Parameters that the line does not set.
        seed: The line's, if it sets none; the same in every run.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: There is nothing to continue, or a value is out of range.
    """
    prompt_ids, num_context_tokens = _prompt(record, tokenizer)
    given = {name: record[name] for name in _PARAMETERS if record.get(name) is not None}
    if "stop" in given:
        stop = given["stop"]
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    references = record.get("references") or []
    if isinstance(references, str) or not all(isinstance(text, str) for text in references):
        raise TypeError('"references" are a list of texts')
    return {
        "prompt": prompt_ids,
        "num_context_tokens": num_context_tokens,
        "params": replace(defaults, **{"seed": seed, **given}),
        "references": references,
    }


def _prompt(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    if "prompt_ids" in record:
        return [int(token) for token in record["prompt_ids"]], 0
    if isinstance(record.get("prompt"), str):
        return encode(tokenizer, record["prompt"]), 0
    messages = record.get("messages")
    if isinstance(messages, Sequence) and messages and all(isinstance(turn, Mapping) for turn in messages):
        return chat_prompt(tokenizer, [{**turn, "content": text_of(dict(turn))} for turn in messages])
    raise ValueError(f"there is no prompt (it has: {', '.join(record) or 'nothing'}): expected {_EXPECTED}")


@dataclass(frozen=True, slots=True)
class Report:
    """What one run did, without earlier runs that it resumed.

    Attributes:
        num_rows: Lines answered.
        num_errors: Lines that could not be answered.
        num_tokens: Tokens generated.
        seconds: From the first line to the last.
        padding_share: Share of positions in forwards that held neither a token of a row nor of a draft.
        filled_share: Share of slots in decode forwards that held a row.
    """

    num_rows: int
    num_errors: int
    num_tokens: int
    seconds: float
    padding_share: float
    filled_share: float

    def __str__(self) -> str:
        errors = f", {self.num_errors} of them not answered" if self.num_errors else ""
        return (
            f"{self.num_rows + self.num_errors} rows{errors} in {self.seconds:.1f} s: "
            f"{self.num_rows / self.seconds:.2f} rows/s, {self.num_tokens / self.seconds:.1f} tokens/s, "
            f"{self.padding_share:.1%} padding, {self.filled_share:.1%} of slots filled"
        )


@dataclass(slots=True)
class _Line:
    """A line of the input, and its number among those that are not empty."""

    number: int
    source: JsonLine
    named: dict[str, Any] = field(default_factory=dict)  # its id, if it has one

    def output(self, content: Mapping[str, Any]) -> str:
        """The output line; it does not depend on when or in which batch this line ran."""
        line = json.dumps({"line": self.source.number, **self.named, **content}, ensure_ascii=False) + "\n"
        return line.encode("utf-8", "backslashreplace").decode("utf-8")  # half a surrogate pair


class Output(Protocol):
    """Where answers go: memory, or a file, see :mod:`~local_backend.offline.ordered_output`."""

    num_done: int

    def __contains__(self, number: object, /) -> bool:
        """Whether the line with this number, 0 for the first, is there already."""

    def add(self, lines: Mapping[int, str]) -> None:
        """Stores lines by number."""

    def finish(self, num_lines: int) -> None:
        """Called when all lines are there."""


@dataclass
class OfflineRun:
    """Answers every line of a file, or every line given.

    Attributes:
        engine: Decodes; made for this run, as the report states its statistics.
        source: A file of JSON lines, or such lines; see :func:`row_arguments`. Empty lines are skipped.
        output: One line for each, in the same order.
        defaults: Parameters for lines that do not set them.
        seed: Of the run; each line's own seed follows from it and the line's number.
        max_in_flight: Maximum lines in the engine at a time.
    """

    engine: Engine
    source: Path | Iterable[JsonLine]
    output: Output
    defaults: SamplingParams
    seed: int = 0
    max_in_flight: int = 256

    def __post_init__(self) -> None:
        self._updates: SimpleQueue[tuple[int, Update]] = SimpleQueue()
        self._in_flight: dict[int, tuple[Row, _Line]] = {}
        self._num_lines = self._num_rows = self._num_errors = self._num_tokens = 0

    def __call__(self, on_progress: Callable[[int], None] = lambda _: None) -> Report:
        """Answer the lines that are not answered yet, then finish the output.

        Args:
            on_progress: Called with the number of lines done, those of earlier runs included.

        Raises:
            Exception: The error that ended the engine; the run can be resumed.
        """
        started = time.perf_counter()
        lines = (line for line in self._read() if line.number not in self.output)
        upcoming = next(lines, None)
        try:
            while upcoming is not None or self._in_flight:
                done: dict[int, str] = {}
                rows: list[Row] = []
                while upcoming is not None and len(self._in_flight) < self.max_in_flight:
                    row = self._begin(upcoming, done)
                    rows.extend([row] if row is not None else [])
                    upcoming = next(lines, None)
                if rows:
                    self.engine.submit(rows)
                if not done:
                    done = self._wait()
                self.output.add(done)
                on_progress(self.output.num_done)
        finally:
            self.engine.cancel([row for row, _ in self._in_flight.values()])
        self.output.finish(self._num_lines)
        return self._report(time.perf_counter() - started)

    def _read(self) -> Iterator[_Line]:
        lines = read_lines(self.source) if isinstance(self.source, Path) else self.source
        for number, line in enumerate(lines):
            self._num_lines = number + 1
            yield _Line(number, line)

    def _begin(self, line: _Line, done: dict[int, str]) -> Row | None:
        """The row for a line; if the line is invalid, its error goes into ``done``."""
        try:
            record = line.source.record()
            if not isinstance(record, Mapping):
                raise ValueError(f"expected a JSON object, got {type(record).__name__}")
            line.named = {"id": record["id"]} if "id" in record else {}
            arguments = row_arguments(
                record, self.engine.tokenizer, self.defaults, seed=self.seed + line.source.number
            )
            # Nobody reads the stream.
            row = self.engine.make_row(
                listener=partial(self._note, line.number), min_interval_seconds=math.inf, **arguments
            )
        except Exception as error:  # whatever is wrong with a line, the others are answered
            done[line.number] = self._error(line, error)
            return None
        self._in_flight[line.number] = row, line
        return row

    def _note(self, number: int, update: Update) -> None:
        if update.is_last:
            self._updates.put((number, update))

    def _wait(self) -> dict[int, str]:
        """The lines of all rows that have ended by now; waits for at least one."""
        done: dict[int, str] = {}
        while not done or not self._updates.empty():
            number, update = self._updates.get()
            _, line = self._in_flight.pop(number)
            done[number] = self._line_of(line, update)
        return done

    def _line_of(self, line: _Line, update: Update) -> str:
        if (completion := update.completion) is None:
            assert update.error is not None
            if not isinstance(update.error, ValueError):
                raise update.error  # not an error of the line: it may be answered when the run is resumed
            return self._error(line, update.error)
        self._num_rows += 1
        self._num_tokens += len(completion.token_ids)
        return line.output(
            {
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "num_prompt_tokens": completion.num_prompt_tokens,
                "num_tokens": len(completion.token_ids),
            }
        )

    def _error(self, line: _Line, error: BaseException) -> str:
        self._num_errors += 1
        return line.output({"error": f"{type(error).__name__}: {error}"})

    def _report(self, seconds: float) -> Report:
        stats = self.engine.stats
        num_slots = stats.num_forwards * self.engine.max_rows
        return Report(
            self._num_rows,
            self._num_errors,
            self._num_tokens,
            seconds,
            stats.num_padding / stats.num_positions if stats.num_positions else 0.0,
            stats.num_row_forwards / num_slots if num_slots else 0.0,
        )
