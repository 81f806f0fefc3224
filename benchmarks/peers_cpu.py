"""The engine against ``transformers``, llama.cpp and vLLM on a CPU: one run, same prompts, model and threads.

The ways alternate and generate greedily: answers to plain questions (nothing to copy), answers from documents
and edits of an earlier answer, one at a time and many at once. Each figure is the median of the repeats that
fit in ``--seconds``, at least one, for each kind of prompt and batch size. Every way has answered before.

llama.cpp and vLLM run in processes of their own (``make peers`` installs them); a peer that is not there is
left out and the reason printed. ``transformers``' prompt lookup takes no batches. llama.cpp needs a GGUF
file: ``--model`` if it is one, that of the default model, or ``--gguf``. It may hold weights that are rounded
otherwise; answers, and what there is to copy in them, then differ.

``GiB`` is by how much loading a model and an answer made this process grow, the same for ways that share the
model, or the size of the peer's process; vLLM's includes the cache of 1 GiB that it reserves.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import vllm_worker
from benchmarks.copy_workloads import QUOTING_REQUESTS
from benchmarks.peers import Task, aside
from benchmarks.peers_gpu import GREEDY, LOOKUP, compare, free_tasks, shortened
from benchmarks.peers_on_cpu import Contestants, contestants, gguf_of
from benchmarks.results import save
from benchmarks.workloads import add_model_argument, questions
from local_backend.models.loading import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = {
    "first_token_ms": "first token ms",
    "decode_tokens_per_second": "decode t/s",
    "tokens_per_second": "end to end t/s",
    "tokens_per_forward": "t/forward",
    "memory_gib": "GiB",
    "same_answers": "same",
}
_WARM_UP_TOKENS = 8
_PEERS = ("transformers", "llama.cpp", "vLLM")


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_cpu", description=__doc__)
    add_model_argument(parser)
    parser.add_argument("--gguf", help="the model for llama.cpp")
    parser.add_argument("--dtype", default="auto", help="of the weights (%(default)s)")
    parser.add_argument("--quantizations", nargs="*", default=["int4"], help="also run ours with these")
    parser.add_argument(
        "--quantized-dtype", default="auto", help="dtype of the quantized model (%(default)s)"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=_PEERS[1:], default=_PEERS[1:], help="beside transformers"
    )
    parser.add_argument("--vllm-python", default=str(vllm_worker.ROOT / ".vllm" / "bin" / "python"))
    parser.add_argument("--kinds", nargs="+", default=["chat", *QUOTING_REQUESTS], help="of prompts (all)")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], help="answers at a time (1 16)")
    parser.add_argument("--cases", type=int, default=4, help="prompts of each kind one by one (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="maximum of an answer (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="for each kind and size (%(default)s)")
    parser.add_argument("--name", default="peers_cpu", help="of the result file (%(default)s)")
    parser.add_argument("--save", action="store_true", help="keep a dated file and a picture of it")
    options = parser.parse_args(arguments)
    _, tokenizer = aside(partial(load, options.model, dtype=options.dtype))
    tasks = tasks_of(tokenizer, max(options.cases, *options.batches), options.tokens)
    results: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # peers' processes end with this one
    warm_up = shortened(tasks["chat"][: max(options.batches)], _WARM_UP_TOKENS)
    with contestants(options, warm_up) as found:
        console = Console(width=120, stderr=True)
        for name, reason in found.absent.items():
            console.print(f"without {name}: {reason}", highlight=False)
        for kind in options.kinds:
            for size in options.batches:
                batches = [[task] for task in tasks[kind][: options.cases]]
                if size > 1:
                    batches = [tasks[kind][:size]]
                name = f"{kind}, {size}"
                results[name] = _compare(found, batches, options)
                console.print(_table({name: results[name]}))
    summary = {
        "model": Path(options.model or "default").name,
        "gguf": gguf.name if (gguf := gguf_of(options)) else None,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "absent": found.absent,
        "ours_over": {name: _ratios(ways) for name, ways in results.items()},
        **results,
    }
    Console(width=120).print(_table(results))
    if options.save:
        path = save(options.name, summary, [])
        _picture(results).savefig(path.with_suffix(".png"), dpi=110)
    print(json.dumps(summary))


def _compare(
    found: Contestants, batches: Sequence[Sequence[Task]], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Figures of all ways that take such batches."""
    ways = {name: way for name, way in found.ways.items() if name != LOOKUP or len(batches[0]) == 1}
    figures = compare(ways, batches, seconds=options.seconds, warm_up=False)
    for name, figure in figures.items():
        del figure["peak_gib"]  # of a GPU
        figure["memory_gib"] = found.memory_gib[name]
    return figures


def _ratios(ways: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The best of ours over each way of others, end to end and decoding alone."""
    theirs = [name for name in ways if name.startswith(_PEERS)]
    ratios: dict[str, dict[str, float]] = {}
    for column in ("tokens_per_second", "decode_tokens_per_second"):
        best = max((figures[column] for name, figures in ways.items() if name not in theirs), default=0.0)
        ratios[column] = {name: round(best / (ways[name][column] or 1.0), 2) for name in theirs}
    return ratios


def _table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    table = Table("prompts", "way", *_COLUMNS.values(), "over greedy")
    table.columns[1].no_wrap = True
    for kind, ways in results.items():
        for way, figures in ways.items():
            over = figures["tokens_per_second"] / ways[GREEDY]["tokens_per_second"]
            table.add_row(kind, way, *(f"{figures[column]:g}" for column in _COLUMNS), f"{over:.2f}")
    return table


def _picture(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """Tokens a second of each way, end to end, by kind of prompts."""
    from benchmarks.pictures import new_figure

    columns = 2
    rows = -(-len(results) // columns)
    tallest = max(map(len, results.values()))
    figure = new_figure(figsize=(11, rows * (0.8 + 0.24 * tallest)))
    figure.supxlabel("tokens a second, end to end")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for (kind, ways), axis in zip(results.items(), axes, strict=False):
        names = list(ways)[::-1]
        shades = ["#9aa5b1" if name.startswith(_PEERS) else "#21669a" for name in names]
        bars = axis.barh(names, [ways[name]["tokens_per_second"] for name in names], color=shades)
        axis.bar_label(bars, fmt="%.0f", padding=2)
        axis.set(title=f"{kind} at a time")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes:  # one that is left over
        axis.set_axis_off()
    return figure


if __name__ == "__main__":
    main()
