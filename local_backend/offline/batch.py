"""Offline generation: the lines of a file through the engine, a bounded number at a time.

Knows lines, rows and their updates. Does not know models, or where answers are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from local_backend.engine.engine import Engine
from local_backend.langchain.chat_format import PARAMETERS, turn_ends
from local_backend.offline.jsonl import JsonLine
from local_backend.offline.prompt_file import record_prompt
from local_backend.sequences.outputs import Update
from local_backend.sequences.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PARAMETERS = (*PARAMETERS, "stop")


def row_arguments(
    record: Any, tokenizer: PreTrainedTokenizerBase, defaults: SamplingParams, *, seed: int
) -> dict[str, Any]:
    """The arguments of :meth:`~local_backend.Engine.make_row` for a line; unknown keys are ignored.

    The record is a prompt, see :func:`~local_backend.offline.prompt_file.record_prompt`, optionally with
    ``references`` and fields of :class:`~local_backend.SamplingParams`.

    Raises:
        TypeError, ValueError: There is no prompt, or a value has the wrong type or is out of range.
    """
    prompt_ids, num_context_tokens = record_prompt(record, tokenizer)
    given = {name: record[name] for name in _PARAMETERS if record.get(name) is not None}
    if "stop" in given:
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
    references = record.get("references") or []
    if isinstance(references, str) or not all(isinstance(text, str) for text in references):
        raise TypeError('"references" must be a list of texts')
    return {
        "prompt": prompt_ids,
        "num_context_tokens": num_context_tokens,
        "params": replace(defaults, stop_token_ids=turn_ends(tokenizer), **{"seed": seed, **given}),
        "references": references,
    }


def answer_lines(
    engine: Engine,
    lines: Iterable[JsonLine],
    defaults: SamplingParams,
    *,
    seed: int = 0,
    max_in_flight: int = 256,
) -> Iterator[tuple[JsonLine, dict[str, Any]]]:
    """Answer lines, at most ``max_in_flight`` at a time; yields each one as soon as it is answered.

    Yields:
        The line and its output record: its number as ``line``, its ``id`` if it has one, and its answer or
        an ``error``; what ends the engine is raised. Its seed follows from ``seed`` and its number.
    """
    outcomes: SimpleQueue[tuple[int, Update | Exception]] = SimpleQueue()
    in_flight: dict[int, _LineInFlight] = {}
    upcoming = enumerate(map(_LineInFlight, lines))

    def note(index: int, update: Update) -> None:
        if update.is_last:
            outcomes.put((index, update))

    try:
        while True:
            rows = []
            for index, line in islice(upcoming, max_in_flight - len(in_flight)):
                in_flight[index] = line
                try:
                    arguments = row_arguments(
                        line.read(), engine.tokenizer, defaults, seed=seed + line.source.number
                    )
                    line.row = engine.make_row(
                        listener=partial(note, index),
                        min_interval_seconds=math.inf,  # nobody reads the stream
                        **arguments,
                    )
                    rows.append(line.row)
                except Exception as error:  # whatever is wrong with a line, the others are answered
                    outcomes.put((index, error))
            if rows:
                engine.submit(rows)
            if not in_flight:
                return
            index, outcome = outcomes.get()
            line = in_flight.pop(index)
            yield line.source, line.head | _content(outcome)
    finally:
        engine.cancel([line.row for line in in_flight.values() if line.row is not None])


class _LineInFlight:
    def __init__(self, source: JsonLine) -> None:
        self.source, self.row = source, cast("Any", None)
        self.head: dict[str, Any] = {"line": source.number}  # what its output record begins with

    def read(self) -> Mapping[str, Any]:
        record = self.source.record()
        if not isinstance(record, Mapping):
            raise ValueError(f"expected a JSON object, got {type(record).__name__}")
        if "id" in record:
            self.head["id"] = record["id"]
        return record


def _content(outcome: Update | Exception) -> dict[str, Any]:
    if isinstance(outcome, Exception):
        return {"error": f"{type(outcome).__name__}: {outcome}"}
    if (completion := outcome.completion) is None:
        assert outcome.error is not None
        if not isinstance(outcome.error, ValueError):
            raise outcome.error  # not an error of the line: it may be answered when the run is resumed
        return _content(outcome.error)
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": completion.num_prompt_tokens,
        "num_tokens": len(completion.token_ids),
    }
