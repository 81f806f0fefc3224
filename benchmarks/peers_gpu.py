"""The engine against ``transformers`` and vLLM on a GPU: greedy decoding, drafters, and Skeleton-of-Thought.

Models with random weights in bfloat16 (``--shapes``) generate given answers: a model with random weights says
nothing, so the model itself makes the next token of the answer the most likely one, at the same small cost
for every way. A pretrained model (``--model``) generates freely. Prompts are documents with a question, or an
earlier answer to edit, so that there is something to copy.

The pretrained model also answers questions plainly and by Skeleton-of-Thought, see ``benchmarks.sot_models``.

The ways alternate; each figure is the median of the repeats that fit in a share of ``--seconds`` for each
model and batch size, after one warm-up. When the time is up, the benchmark ends with what it has.
``transformers``' prompt lookup does not support batches and is left out of them. vLLM answers with the
pretrained model, if ``--vllm-python`` is there: it needs an environment of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.copy_workloads import QUOTING_REQUESTS, SHAPES, forced_tasks
from benchmarks.forced_model import NUM_SPECIAL, VOCABULARY_SIZE, forced_model, relabelled
from benchmarks.peers import PROMPT_LOOKUP_TOKENS, Run, Task, run_transformers
from benchmarks.peers_sot import compare_sot, sot_table
from benchmarks.results import add_save_argument, report
from benchmarks.time_limit import Clock, TimeIsUp
from benchmarks.vllm_worker import VllmProcess, folder_of
from benchmarks.workloads import add_model_argument
from local_backend import ChatLocal, Engine, SamplingParams
from local_backend.models.loading import load
from local_backend.scheduling.lengths import Scheduling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DRAFTERS = ("autoregressive", "reference_copy", "combined")
GREEDY, LOOKUP, COMPILED = "transformers greedy", "transformers prompt lookup", "transformers compiled"

_VLLM, _VLLM_SHARE = "vLLM greedy", 0.4  # of the GPU's memory
_SHARED_GPU = Scheduling(gpu_memory_share=0.2)  # the engines that are compared are there at once

Way = Callable[[Sequence[Task]], Run]


def shortened(tasks: Sequence[Task], num_tokens: int) -> list[Task]:
    """The tasks with answers of at most ``num_tokens``."""
    return [
        replace(
            task, target=task.target and task.target[:num_tokens], num_tokens=min(task.num_tokens, num_tokens)
        )
        for task in tasks
    ]


def free_tasks(tokenizer: PreTrainedTokenizerBase, count: int, num_tokens: int) -> list[Task]:
    """Chat prompts that ask to quote documents and to edit an answer, in turn."""
    kinds, tasks = list(QUOTING_REQUESTS.values()), []
    for number in range(count):
        turns = kinds[number % len(kinds)](random.Random(f"peers {number}"))
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(cast("str", text), add_special_tokens=False)
        tasks.append(Task(tuple(ids), (), None, num_tokens))
    return tasks


def run_peer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], **settings: Any
) -> Run:
    """``model.generate``; targets are not forced by a processor, the model itself writes them."""
    free = [replace(task, target=None) for task in tasks]
    if "cache_implementation" in settings:  # compiled forwards run no hooks
        return run_transformers(model, tokenizer, free, **settings)
    ended_at: list[float] = []

    def note(*_: Any) -> None:
        if not ended_at and torch.cuda.is_available():
            torch.cuda.synchronize()
        ended_at.append(time.perf_counter())

    handle = model.register_forward_hook(note)
    try:
        started = time.perf_counter()
        run = run_transformers(model, tokenizer, free, **settings)
    finally:
        handle.remove()
    num_decoded = sum(len(answer) - 1 for answer in run.token_ids)
    decode_seconds = run.seconds - (ended_at[0] - started)
    return replace(
        run,
        decode_seconds=decode_seconds,
        num_decoded=num_decoded,
        num_forwards=len(ended_at) * len(tasks),
    )


def run_ours(engine: Engine, tasks: Sequence[Task]) -> Run:
    """All tasks in one batch of an engine."""
    params = [SamplingParams(max_tokens=task.num_tokens, temperature=0.0) for task in tasks]
    started = time.perf_counter()
    completions = engine.generate([task.prompt for task in tasks], params)
    seconds = time.perf_counter() - started
    stats = [completion.stats for completion in completions]
    first = max(cast("float", stat.first_token_seconds) for stat in stats)
    ended = max(cast("float", stat.finished_seconds) for stat in stats)
    num_tokens = sum(stat.num_tokens for stat in stats)
    return Run(
        tuple(tuple(completion.token_ids) for completion in completions),
        seconds,
        ended - first,
        num_tokens - sum(stat.tokens_by_forward[0] for stat in stats),
        sum(stat.num_forwards for stat in stats),
    )


@dataclass(frozen=True)
class Measured:
    """One run of one way on one batch of tasks."""

    run: Run
    peak_bytes: int


def compare(
    ways: dict[str, Way],
    batches: Sequence[Sequence[Task]],
    *,
    seconds: float,
    max_repeats: int = 5,
    warm_up: bool = True,
) -> dict[str, dict[str, Any]]:
    """Run the ways in turn until the time is used up, at least once after a warm-up; medians by way.

    A :class:`TimeIsUp` ends it, too: ways that have not run by then are left out.
    """
    deadline = time.perf_counter() + seconds
    measured: dict[str, list[list[Measured]]] = {name: [] for name in ways}
    try:
        for repeat in range(-1 if warm_up else 0, max_repeats):  # the first is the warm-up
            began = time.perf_counter()
            names = list(ways)
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                runs = [_measured(ways[name], batch) for batch in batches]
                if repeat >= 0:
                    measured[name].append(runs)
            ended = time.perf_counter()
            if repeat >= 0 and ended + (ended - began) > deadline:
                break
    except TimeIsUp:
        measured = {name: repeats for name, repeats in measured.items() if repeats}
    expected = {name: _answers(repeats[0]) for name, repeats in measured.items()}
    baseline = next(iter(expected.values()), [])
    return {
        name: {
            **_figures(repeats),
            "repeats": len(repeats),
            "same_answers": round(
                statistics.mean(one == other for one, other in zip(expected[name], baseline, strict=True)),
                3,
            ),
        }
        for name, repeats in measured.items()
    }


def _answers(runs: Sequence[Measured]) -> list[tuple[int, ...]]:
    return [answer for one in runs for answer in one.run.token_ids]


def _measured(way: Way, batch: Sequence[Task]) -> Measured:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    run = way(batch)
    return Measured(run, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)


def _figures(repeats: Sequence[Sequence[Measured]]) -> dict[str, Any]:
    def median(value: Callable[[Sequence[Run]], float]) -> float:
        return statistics.median(value([one.run for one in runs]) for runs in repeats)

    def tokens(runs: Sequence[Run]) -> int:
        return sum(len(answer) for run in runs for answer in run.token_ids)

    num_forwards = sum(one.run.num_forwards for one in repeats[0])
    return {
        "first_token_ms": round(
            1e3 * median(lambda runs: statistics.mean(run.seconds - run.decode_seconds for run in runs)), 1
        ),
        "decode_tokens_per_second": round(
            median(
                lambda runs: sum(run.num_decoded for run in runs) / sum(run.decode_seconds for run in runs)
            ),
            1,
        ),
        "tokens_per_second": round(median(lambda runs: tokens(runs) / sum(run.seconds for run in runs)), 1),
        "tokens_per_forward": round(tokens([one.run for one in repeats[0]]) / max(1, num_forwards), 2),
        "peak_gib": round(max(one.peak_bytes for runs in repeats for one in runs) / 2**30, 2),
    }


def compare_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    options: argparse.Namespace,
    clock: Clock,
    folder: Path | None = None,
) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """The figures of a model by batch size and way; vLLM's too if the model's ``folder`` is given."""
    for size in options.batches:
        ways: dict[str, Way] = {GREEDY: partial(run_peer, model, tokenizer)}
        if size == 1:
            ways[LOOKUP] = partial(run_peer, model, tokenizer, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS)
            if options.compiled:
                ways[COMPILED] = partial(run_peer, model, tokenizer, cache_implementation="static")
        with ExitStack() as opened:
            for drafter, graphs in _kinds_of_engines(size, options.device):
                engine = Engine(
                    model, tokenizer, drafter, max_prefix_bytes=0, compiled=graphs, scheduling=_SHARED_GPU
                )
                opened.callback(engine.close)
                _ = engine.width_costs  # measured before timing starts
                ways[f"{drafter}, graphs" if graphs else drafter] = partial(run_ours, engine)
            if folder is not None and (python := Path(options.vllm_python)).exists():
                ways |= _vllm_ways(python, folder, size, options.device, opened)
            batches = [[task] for task in tasks[: options.cases]] if size == 1 else [tasks[:size]]
            yield str(size), compare(ways, batches, seconds=clock.next_share())


def _vllm_ways(python: Path, folder: Path, size: int, device: str, opened: ExitStack) -> dict[str, Way]:
    """Greedy decoding by vLLM, on a GPU with its own graphs and a share of the memory."""
    extra = {} if device == "cpu" else {"enforce_eager": False, "gpu_memory_utilization": _VLLM_SHARE}
    process = VllmProcess(
        python,
        folder,
        _VLLM,
        dtype="bfloat16",
        num_threads=torch.get_num_threads(),
        num_rows=size,
        num_positions=2048,
        **extra,
    )
    opened.callback(process.process.close)
    return {_VLLM: process}


def _kinds_of_engines(size: int, device: str) -> list[tuple[str, bool]]:
    """Drafters, with CUDA graphs or without; without them fewer, since each engine has a cache of its own."""
    if device == "cpu":
        return [(drafter, False) for drafter in DRAFTERS]
    without = DRAFTERS[:2] if size == 1 else DRAFTERS[:1]
    return [*((drafter, False) for drafter in without), *((drafter, True) for drafter in DRAFTERS)]


def run_parts(options: argparse.Namespace, clock: Clock, results: dict[str, Any]) -> None:
    """Measure part by part into ``results``, which has what was measured if time is up."""
    count = max(options.cases, *options.batches)
    model, tokenizer = load(options.model, device=options.device)
    folder = folder_of(options.model, model.dtype)
    with ChatLocal(engine=Engine(model, tokenizer), max_tokens=options.sot_tokens) as chat:
        results["sot"] = asyncio.run(compare_sot(chat, options.questions, clock.next_share()))
    tasks = free_tasks(tokenizer, count, options.tokens)
    results["pretrained"] = {}
    for size, figures in compare_model(model, tokenizer, tasks, options, clock, folder):
        results["pretrained"][size] = figures
        print(json.dumps(results), flush=True)
    del model
    tasks, ids_per_text = relabelled(shortened(forced_tasks(tokenizer, count, seed=1), options.tokens))
    for shape in options.shapes:
        forced = forced_model(shape, options.device, max(VOCABULARY_SIZE, NUM_SPECIAL + count * ids_per_text))
        forced.force(tasks, ids_per_text)
        results[shape] = {}
        for size, figures in compare_model(forced, tokenizer, tasks, options, clock):
            results[shape][size] = figures
        del forced
        if options.device != "cpu":
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_gpu", description=__doc__)
    add_model_argument(parser)
    parser.add_argument("--shapes", nargs="*", default=["1b", "7b"], choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--cases", type=int, default=3, help="answers one by one (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="maximum of an answer (%(default)s)")
    parser.add_argument("--questions", type=int, default=16, help="for Skeleton-of-Thought (%(default)s)")
    parser.add_argument("--sot-tokens", type=int, default=1024, help="maximum of a reply there (%(default)s)")
    parser.add_argument("--seconds", type=float, default=480, help="end after them (%(default)s)")
    parser.add_argument("--compiled", action="store_true", help="also generate with torch.compile")
    parser.add_argument(
        "--vllm-python", default=".vllm/bin/python", help="of vLLM's environment (%(default)s)"
    )
    add_save_argument(parser)
    options = parser.parse_args(arguments)
    num_parts = 1 + len(options.batches) * (1 + len(options.shapes))
    clock, results = Clock(started + options.seconds, num_parts), dict[str, Any]()
    with clock.limit():
        run_parts(options, clock, results)
    results["seconds"] = round(time.perf_counter() - started, 1)
    results["is_complete"] = clock.deadline > time.perf_counter()
    if "sot" in results:
        Console(width=120).print(sot_table(results["sot"]))
    report("peers_gpu", _table(results), results, keep=options.save, width=120)


def _table(results: dict[str, Any]) -> Table:
    table = Table(
        "model", "batch", "way", "first token ms", "decode t/s", "end to end t/s", "t/forward", "GiB", "same"
    )
    columns = ("first_token_ms", "decode_tokens_per_second", "tokens_per_second", "tokens_per_forward")
    for name in [name for name in results if name == "pretrained" or name in SHAPES]:
        for size, ways in results[name].items():
            for way, figures in ways.items():
                shown = [f"{figures[column]:g}" for column in (*columns, "peak_gib", "same_answers")]
                table.add_row(name, size, way, *shown)
    return table


if __name__ == "__main__":
    main()
