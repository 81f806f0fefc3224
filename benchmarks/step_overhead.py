"""Microseconds of a decode step and of a row in it, by what the rows ask for.

A random model so small that its forward hardly counts, with the vocabulary of a real one (``--model`` takes a
real model instead). Every setting decodes the same number of tokens in batches of 1, 8, 16 and 64 rows, in
alternating rounds; a figure is the median of its rounds. ``host`` is the part of a step outside of the
forward: choosing tokens, drafts, the cache and the rows. ``over_greedy`` compares a whole step, and its
median is taken over the rounds, each of which holds both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.copy_workloads import SHAPES, random_llama
from benchmarks.results import save
from benchmarks.workloads import add_model_argument
from local_backend import Engine, SamplingParams
from local_backend.models.loading import choose_device, load

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "min_tokens": {"min_tokens": 4096},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "penalties_min_tokens_temperature": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "min_tokens": 4096,
        "temperature": 0.8,
    },
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "min_tokens": 4096,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
    },
}
_VOCABULARY = 49_152
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Steps:
    """Seconds of one round: of a step, and of its forward."""

    step: float
    forward: float


class StepTimer:
    """Decodes rows of random prompts with one model and times the steps."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
        self._engine = Engine(model, tokenizer, max_prefix_bytes=0)
        self._size = min(int(model.config.vocab_size), len(tokenizer))
        self._num_tokens = num_tokens
        self._forward_seconds = 0.0
        # The loop has no hook between its phases, and needs none for anything else.
        self._forward = self._engine._loop.forward
        cast("Any", self._engine._loop).forward = self._timed_forward

    def _timed_forward(self, *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        logits = self._forward(*arguments, **options)
        if logits is not None and logits.device.type == "cuda":
            torch.cuda.synchronize(logits.device)
        self._forward_seconds += time.perf_counter() - started
        return logits

    def __call__(self, num_rows: int, setting: dict[str, Any]) -> Steps:
        """One batch of ``num_rows`` rows that all ask for ``setting``."""
        prompts = [[(7 * row + 13 * place) % self._size for place in range(8)] for row in range(num_rows)]
        for num_tokens in (_WARM_UP_TOKENS, self._num_tokens):
            params = [
                SamplingParams(max_tokens=num_tokens, ignore_end=True, seed=row, **setting)
                for row in range(num_rows)
            ]
            self._forward_seconds, before = 0.0, self._engine.stats.num_forwards
            started = time.perf_counter()
            self._engine.generate(prompts, params)
            seconds = time.perf_counter() - started
        num_steps = self._engine.stats.num_forwards - before
        return Steps(seconds / num_steps, self._forward_seconds / num_steps)

    def close(self) -> None:
        """End the engine's thread."""
        self._engine.close()


def measure(
    timer: StepTimer, rows: Sequence[int], settings: Sequence[str], repeats: int, progress: Progress
) -> dict[str, dict[str, dict[str, float]]]:
    """By number of rows and setting: microseconds, and the ratio to a greedy step."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    bar = progress.add_task("steps", total=len(rows) * len(settings) * repeats)
    for num_rows in rows:
        rounds: dict[str, list[Steps]] = {name: [] for name in settings}
        for repeat in range(repeats):
            shift = repeat % len(settings)
            for name in [*settings[shift:], *settings[:shift]]:  # rotates which goes first
                rounds[name].append(timer(num_rows, SETTINGS[name]))
                progress.advance(bar)
        results[str(num_rows)] = {
            name: _figures(num_rows, each, rounds["greedy"]) for name, each in rounds.items()
        }
    return results


def _figures(num_rows: int, rounds: Sequence[Steps], greedy: Sequence[Steps]) -> dict[str, float]:
    step = statistics.median(one.step for one in rounds)
    host = statistics.median(one.step - one.forward for one in rounds)
    over = statistics.median(one.step / other.step for one, other in zip(rounds, greedy, strict=True))
    return {
        "step_us": round(step * 1e6, 1),
        "row_us": round(step * 1e6 / num_rows, 1),
        "host_us": round(host * 1e6, 1),
        "over_greedy": round(over, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_overhead", description=__doc__)
    add_model_argument(parser)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny", help="size of the random model")
    parser.add_argument("--vocabulary", type=int, default=_VOCABULARY, help="of the random model")
    parser.add_argument("--device", default="auto", help="where the model runs (%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--tokens", type=int, default=32, help="steps of a round (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (%(default)s)")
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    settings = list(dict.fromkeys(["greedy", *options.settings]))
    device = choose_device(options.device).type
    model, tokenizer = load(options.model, device=device)
    if options.model is None:
        model = random_llama(options.shape, options.vocabulary, device)
        if device == "cpu":
            model = cast("Any", model).float()
    timer = StepTimer(model, tokenizer, options.tokens)
    with Progress(console=Console(stderr=True)) as progress:
        results = measure(timer, options.rows, settings, options.repeats, progress)
    timer.close()
    table = Table("rows", "setting", "us a step", "us a row", "us of the host", "over greedy")
    for num_rows, by_setting in results.items():
        for name, figures in by_setting.items():
            table.add_row(num_rows, name, *(f"{value:.3f}".rstrip("0") for value in figures.values()))
    Console(width=100).print(table)
    summary = {"device": device, "model": options.model or options.shape, "rows": results}
    if options.save:
        save("step_overhead", summary, [])
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
