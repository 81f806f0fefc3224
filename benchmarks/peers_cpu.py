"""The engine against ``transformers`` on a CPU: one run, same prompts, model and threads.

The ways alternate, one prompt at a time, and generate greedily: answers to plain questions (nothing to copy),
answers from documents and edits of an earlier answer. Each figure is the median of the repeats that fit in
``--seconds`` for each kind of prompt, after one warm-up.

``memory_gib`` is by how much loading a model and a first answer made the process grow, the same for all ways
that share the model. llama.cpp is not compared: it needs an environment of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.copy_workloads import QUOTING_REQUESTS
from benchmarks.peers import PROMPT_LOOKUP_TOKENS, Task, aside
from benchmarks.peers_gpu import DRAFTERS, GREEDY, LOOKUP, Way, compare, free_tasks, run_ours, run_peer
from benchmarks.results import save
from benchmarks.workloads import add_model_argument, questions
from local_backend import Engine
from local_backend.models.loading import load

_COLUMNS = {
    "first_token_ms": "first token ms",
    "decode_tokens_per_second": "decode t/s",
    "tokens_per_second": "end to end t/s",
    "tokens_per_forward": "t/forward",
    "memory_gib": "GiB",
    "same_answers": "same",
}


def tasks_of(tokenizer: Any, count: int, num_tokens: int) -> dict[str, list[Task]]:
    """``count`` tasks of each kind."""
    chat = []
    for question in questions(count):
        turns = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        chat.append(Task(tuple(ids), (), None, num_tokens))
    kinds = list(QUOTING_REQUESTS)
    quoting = free_tasks(tokenizer, count * len(kinds), num_tokens)
    return {
        "chat": chat,
        **{kind: quoting[number :: len(kinds)] for number, kind in enumerate(kinds)},
    }


@dataclass
class Contestants:
    """The ways to decode, and what they need.

    Attributes:
        ways: By name, the baseline first.
        memory_gib: By name.
    """

    ways: dict[str, Way] = field(default_factory=dict)
    memory_gib: dict[str, float] = field(default_factory=dict)
    _closers: list[Callable[[], object]] = field(default_factory=list)

    def add(self, ways: dict[str, Way], warm_up: Task, before: int) -> None:
        """Add ways that share a model, loaded when the process had ``before`` bytes."""
        for way in ways.values():
            way([warm_up])
        grown = (_resident_bytes() - before) / 2**30
        self.ways.update(ways)
        self.memory_gib.update(dict.fromkeys(ways, round(grown, 2)))

    def add_transformers(self, model_name: str | None, dtype: str, warm_up: Task) -> None:
        """``model.generate`` on a model of its own, which no engine changes."""
        before = _resident_bytes()
        model, tokenizer = aside(partial(load, model_name, dtype=dtype))
        ways: dict[str, Way] = {
            GREEDY: partial(run_peer, model, tokenizer),
            LOOKUP: partial(run_peer, model, tokenizer, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
        }
        self.add(ways, warm_up, before)

    def add_ours(self, model_name: str | None, dtype: str, quantization: str | None, warm_up: Task) -> None:
        """An engine for each drafter."""
        before = _resident_bytes()
        model, tokenizer = aside(partial(load, model_name, dtype=dtype, quantization=quantization))
        ways: dict[str, Way] = {}
        for drafter in DRAFTERS:
            engine = aside(partial(Engine, model, tokenizer, drafter, max_prefix_bytes=0))
            self._closers.append(engine.close)
            ways[f"{drafter}, {quantization}" if quantization else drafter] = partial(run_ours, engine)
        self.add(ways, warm_up, before)

    def close(self) -> None:
        """End the engines."""
        for close in self._closers:
            close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


@contextmanager
def contestants(options: argparse.Namespace, warm_up: Task) -> Iterator[Contestants]:
    """All ways that can run here."""
    found = Contestants()
    try:
        found.add_transformers(options.model, options.dtype, warm_up)
        for quantization in (None, *options.quantizations):
            found.add_ours(options.model, options.dtype, quantization, warm_up)
        yield found
    finally:
        found.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_cpu", description=__doc__)
    add_model_argument(parser)
    parser.add_argument("--dtype", default="bfloat16", help="of the weights (%(default)s)")
    parser.add_argument("--quantizations", nargs="*", default=["int4"], help="also run ours with these")
    parser.add_argument("--cases", type=int, default=4, help="prompts of each kind (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="maximum of an answer (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="for each kind (%(default)s)")
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    _, tokenizer = aside(partial(load, options.model, dtype=options.dtype))
    kinds = tasks_of(tokenizer, options.cases, options.tokens)
    results: dict[str, Any] = {}
    with contestants(options, kinds["chat"][0]) as found:
        for kind, tasks in kinds.items():
            figures = compare(found.ways, [[task] for task in tasks], seconds=options.seconds)
            for name, figure in figures.items():
                del figure["peak_gib"]  # of a GPU
                figure["memory_gib"] = found.memory_gib[name]
            results[kind] = figures
    Console(width=120).print(_table(results))
    if options.save:
        save("peers_cpu", results, [])
    print(json.dumps(results))


def _table(results: dict[str, Any]) -> Table:
    table = Table("prompts", "way", *_COLUMNS.values(), "over greedy")
    for kind, ways in results.items():
        for way, figures in ways.items():
            over = figures["tokens_per_second"] / ways[GREEDY]["tokens_per_second"]
            table.add_row(kind, way, *(f"{figures[column]:g}" for column in _COLUMNS), f"{over:.2f}")
    return table


if __name__ == "__main__":
    main()
