"""Offline generation on a Ray cluster: every row of a dataset is answered once, in the order of the input.

A block of rows is a stateless Ray task: if its machine is lost, Ray runs it again, with the same result. An
engine answers block after block of a worker process. Needs the ``ray`` extra on every machine.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from local_backend.engine.engine import Engine
from local_backend.models.loading import load
from local_backend.offline.batch import answer_lines
from local_backend.offline.jsonl import JsonLine, read_lines
from local_backend.sequences.sampling import SamplingParams

if TYPE_CHECKING:
    from pyarrow import Table
    from ray.data import Dataset

_ANSWER_COLUMNS = ("text", "finish_reason", "num_prompt_tokens", "num_tokens", "error")


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How blocks are answered.

    Attributes:
        model: Folder, GGUF file or hub name that every machine can read; ``None`` for the default model.
        device: Where it runs; by default CUDA for tasks that ask for a GPU, else the CPU.
        params: Parameters of rows that do not set them.
        seed: Of the run; each row's own seed follows from it and the row.
    """

    model: str | None = None
    device: str | None = None
    drafter: str = "autoregressive"
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1024, temperature=0.0))
    max_rows: int = 64
    seed: int = 0


def parallel_batch(
    dataset: Dataset | Iterable[Mapping[str, Any]] | Path,
    settings: BatchSettings | None = None,
    *,
    block_rows: int = 256,
    num_cpus: float = 1,
    num_gpus: float = 0,
) -> Dataset:
    """Answer every row of ``dataset`` on the cluster that ``ray.init`` has joined.

    Args:
        dataset: A Ray dataset, records or a file of JSON lines, with the keys of
            :func:`~local_backend.offline.batch.row_arguments`.
        settings: How they are answered.
        block_rows: Rows answered together, and again if their machine is lost.
        num_cpus: CPUs of one engine: those of a machine, for one engine on each.
        num_gpus: GPUs of one engine.

    Returns:
        The rows with ``text``, ``finish_reason``, ``num_prompt_tokens`` and ``num_tokens``, or ``error`` for
        those that could not be answered. Lazy, as all datasets of Ray: iterating it, or writing it, runs it.
    """
    import ray.data

    settings = settings or BatchSettings()
    if num_gpus and settings.device is None:
        settings = replace(settings, device="cuda")
    if isinstance(dataset, Path):
        dataset = (line.record() for line in read_lines(dataset))
    if not isinstance(dataset, ray.data.Dataset):
        # As text: a column of Arrow has one type, and takes a key that one record lacks as null.
        rows = [{"line": line, "record": json.dumps(record)} for line, record in enumerate(dataset, 1)]
        dataset = ray.data.from_items(rows)
    dataset.context.execution_options.preserve_order = True
    return dataset.map_batches(
        answer_block,
        batch_size=block_rows,
        batch_format="pyarrow",
        fn_kwargs={"settings": settings},
        num_cpus=num_cpus,
        num_gpus=num_gpus or None,
    )


def answer_block(block: Table, *, settings: BatchSettings) -> Table:
    """Answer the rows, or their numbers and JSON, of one block; on the machine that has taken it."""
    import pyarrow

    lines = [_make_line(row) for row in block.to_pylist()]
    engine = _make_engine(replace(settings, params=SamplingParams(), seed=0))
    # Equal lines have equal answers, so that they may share one.
    answers = dict(answer_lines(engine, lines, settings.params, seed=settings.seed))
    types = {"num_prompt_tokens": pyarrow.int64(), "num_tokens": pyarrow.int64()}
    table = block.select([name for name in block.column_names if name not in _ANSWER_COLUMNS])
    for name in _ANSWER_COLUMNS:
        column = [answers[line].get(name) for line in lines]
        table = table.append_column(name, pyarrow.array(column, types.get(name, pyarrow.string())))
    return table


def _make_line(row: Mapping[str, Any]) -> JsonLine:
    """The row as a line; its number, which its seed follows from, does not depend on its block."""
    if row.keys() == {"line", "record"}:
        return JsonLine(Path("the dataset"), row["line"], row["record"].encode())
    content = json.dumps({name: value for name, value in row.items() if value is not None}, default=str)
    return JsonLine(Path("the dataset"), zlib.crc32(content.encode()), content.encode())


@lru_cache(maxsize=1)
def _make_engine(settings: BatchSettings) -> Engine:
    """The engine of this process; Ray runs one block at a time in it."""
    model, tokenizer = load(settings.model, device=settings.device or "cpu")
    return Engine(model, tokenizer, settings.drafter, max_rows=settings.max_rows, scheduling="longest_first")
