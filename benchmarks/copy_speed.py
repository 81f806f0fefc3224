"""Speed of copying: the engine's drafters against ``transformers``' greedy decoding and prompt lookup.

Three workloads, alternating in one run:

- ``100m_forced``: a Llama of about 100 M random parameters in bf16 generates given answers (a logits
  processor leaves one possible token), the same for all methods: passages quoted from documents, and edits of
  earlier answers with a few words in a hundred changed. If the LLMA paper's answers (arXiv 2304.04487) are
  available, each after its ten retrieved documents, they form another workload, ``100m_forced_rag``.
- ``unforced``: a pretrained model (``--model``) in float32 generates freely after prompts that contain what
  it may quote: questions about documents and edits of an earlier answer, in equal numbers
  (``unforced_by_kind`` separates them); all methods must give the same answers.
- ``batch_8``: the first workload, eight rows at once. Prompt lookup does not support batches, so it runs row
  by row.

Two more figures: ``nothing_to_copy`` is the cost of ``combined`` over ``autoregressive`` on answers of random
tokens; ``bfloat16`` is how many of the pretrained model's answers change with the shape of forwards in bf16,
and how close to a tie the two tokens were.

A ratio above 1 says how many times faster a drafter is: the geometric mean over the answers, using each
method's median run. Timing covers decoding, from the first tokens to the last; the ``_end_to_end`` figures
include prefill.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks.copy_workloads import (
    QUOTING_REQUESTS,
    SHAPES,
    forced_tasks,
    given_tasks,
    noise_tasks,
    quoting_prompts,
    random_llama,
)
from benchmarks.peers import Run, Task, aside, run_engine, run_prompt_lookup, run_transformers
from benchmarks.results import save
from benchmarks.span_copy import SpanCopy
from benchmarks.workloads import add_model_argument
from local_backend import ChatLocal, Drafter
from local_backend.drafting import make_drafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "autoregressive": partial(make_drafter, "autoregressive"),
    "span_copy": SpanCopy,  # the paper's own rule
    "reference_copy": partial(make_drafter, "reference_copy"),
    "combined": partial(make_drafter, "combined"),
}
GREEDY, LOOKUP = "transformers_greedy", "prompt_lookup"

_SHARED = Path(__file__).parents[2] / "shared" / "data"
_PAPER_CASES = _SHARED / "reference" / "rag_dev.jsonl"
_PAPER_TOKENIZER = _SHARED / "tokenizers" / "llama2.model"
_NEAR_TIE_LAST_PLACES = 4.0


@dataclass
class Contest:
    """Several decoding methods on the same tasks, alternating.

    Attributes:
        ways: The function that runs each method, by the method's name.
        batches: Tasks that are submitted together.
        repeats: How often each method runs each batch.
    """

    ways: dict[str, Callable[[Sequence[Task]], Run]]
    batches: list[list[Task]]
    repeats: int

    def hold(self, progress: Progress, label: str) -> dict[str, list[Run]]:
        """For each method, the median run of each batch."""
        bar = progress.add_task(label, total=len(self.ways) * len(self.batches) * self.repeats)
        medians: dict[str, list[Run]] = {name: [] for name in self.ways}
        for number, batch in enumerate(self.batches):
            runs: dict[str, list[Run]] = {name: [] for name in self.ways}
            for repeat in range(self.repeats):
                names = list(self.ways)
                shift = (number + repeat) % len(names)
                for name in names[shift:] + names[:shift]:  # rotates which goes first
                    runs[name].append(self.ways[name](batch))
                    progress.advance(bar)
            for name, each in runs.items():
                each.sort(key=lambda run: run.seconds_per_token)
                medians[name].append(each[len(each) // 2])
        return medians


def ratios(medians: dict[str, list[Run]], *, end_to_end: bool) -> dict[str, dict[str, float]]:
    """How many times faster than its peers each drafter is, as a geometric mean over the batches.

    The batches hold two kinds of answers, and a median would fall on one kind by chance.
    """

    def over(drafter: str, peer: str) -> float:
        pairs = zip(medians[peer], medians[drafter], strict=True)
        name = "seconds_per_token_end_to_end" if end_to_end else "seconds_per_token"
        return round(
            statistics.geometric_mean(getattr(one, name) / getattr(other, name) for one, other in pairs), 3
        )

    return {
        drafter: {
            "over_transformers_greedy": over(drafter, GREEDY),
            "over_prompt_lookup": over(drafter, LOOKUP),
            "tokens_per_forward": _tokens_per_forward(medians[drafter]),
        }
        for drafter in DRAFTERS
    }


def _tokens_per_forward(runs: Sequence[Run]) -> float:
    return round(
        sum(len(ids) for run in runs for ids in run.token_ids)
        / max(1, sum(run.num_forwards for run in runs)),
        3,
    )


def ways_of(
    model: PreTrainedModel, peer: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Callable[[Sequence[Task]], Run]]:
    """All decoding methods; the peers use a separate model, which the engine does not change."""
    ways: dict[str, Callable[[Sequence[Task]], Run]] = {
        GREEDY: lambda tasks: run_transformers(peer, tokenizer, tasks),
        LOOKUP: lambda tasks: run_prompt_lookup(peer, tokenizer, tasks),
    }

    def run(make: Callable[[], Drafter], tasks: Sequence[Task]) -> Run:
        return run_engine(model, tokenizer, tasks, make())

    for name, make in DRAFTERS.items():
        ways[name] = partial(run, make)
    return ways


def bfloat16_report(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task]
) -> dict[str, Any]:
    """How often drafts change an answer in bf16, and how close to a tie each first change was.

    The gap is the difference of the two tokens' logits where the answers diverge, from one plain forward over
    the common prefix, in units of the last place of the larger logit.
    """
    plain = run_engine(model, tokenizer, tasks, "autoregressive")
    drafted = run_engine(model, tokenizer, tasks, "reference_copy")
    gaps = []
    for task, one, other in zip(tasks, plain.token_ids, drafted.token_ids, strict=True):
        if one == other:
            continue
        place = next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        text = [*task.prompt, *one[:place]]
        pair = aside(partial(_next_logits, model, text))[[one[place], other[place]]]
        last_place = 2.0 ** (math.floor(math.log2(float(pair.abs().max()))) - 7)  # bf16 keeps 8 bits
        gaps.append(round(float((pair[0] - pair[1]).abs()) / last_place, 2))
    return {
        "rows": len(tasks),
        "differing": len(gaps),
        "share": round(len(gaps) / len(tasks), 4),
        "gaps_in_last_places": sorted(gaps),
        "all_near_ties": all(gap <= _NEAR_TIE_LAST_PLACES for gap in gaps),
    }


@torch.inference_mode()
def _next_logits(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    output: Tensor = model(input_ids=torch.tensor([text], device=model.device)).logits
    return output[0, -1].float()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copy_speed", description=__doc__)
    add_model_argument(parser)
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="maximum tokens of an unforced answer (%(default)s)"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="100m", help="size of the random model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", type=int, default=4, help="answers per workload")
    parser.add_argument("--batch", type=int, default=8, help="rows of the batched workload")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, help="cases of 100m_forced_rag, as for benchmarks.copy_steps")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer of --data")
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    if (options.data is None) != (options.tokenizer is None):
        parser.error("--data and --tokenizer must be given together")
    if options.data is None and _PAPER_CASES.exists():
        options.data, options.tokenizer = _PAPER_CASES, _PAPER_TOKENIZER
    results: dict[str, Any] = {}
    with Progress(console=Console(stderr=True)) as progress:
        chat = aside(lambda: ChatLocal.from_pretrained(options.model, dtype=torch.float32))
        contests = _Contests(results, progress, options.repeats)
        _random_model(contests, chat, options)
        if options.device == "cpu":
            _pretrained_model(contests, chat, options.cases, options.max_tokens)
        chat.close()
    Console(width=100).print(_table(results))
    if options.save:
        where = "" if options.device == "cpu" else f"_{options.device.replace(':', '')}"
        save(f"copy_speed_{options.shape}{where}", results, [])
    print(json.dumps(results))


@dataclass
class _Contests:
    """Runs contests and collects the results of all workloads."""

    results: dict[str, Any]
    progress: Progress
    repeats: int

    def hold(
        self, label: str, ways: dict[str, Callable[[Sequence[Task]], Run]], batches: list[list[Task]]
    ) -> dict[str, list[Run]]:
        medians = Contest(ways, batches, self.repeats).hold(self.progress, label)
        if GREEDY in medians:
            self.results[label] = ratios(medians, end_to_end=False)
            self.results[f"{label}_end_to_end"] = ratios(medians, end_to_end=True)
        return medians


def _random_model(contests: _Contests, chat: ChatLocal, options: argparse.Namespace) -> None:
    """The workloads of the model with random weights: forced answers, alone and in a batch, and noise."""
    tokenizer, size = chat.engine.tokenizer, 64 if options.shape == "tiny" else 256
    tasks = forced_tasks(tokenizer, max(options.cases, options.batch), seed=1)
    workloads = {
        f"{options.shape}_forced": [[task] for task in tasks[: options.cases]],
        f"batch_{options.batch}": [tasks[: options.batch]],
    }
    if options.data is not None:
        workloads[f"{options.shape}_forced_rag"] = [
            [task] for task in given_tasks(options.data, options.tokenizer, options.cases)
        ]
    every = [task for batches in workloads.values() for batch in batches for task in batch]
    vocabulary_size = max(
        32_000, len(tokenizer), 1 + max(max(*task.prompt, *(task.target or ())) for task in every)
    )

    def load() -> PreTrainedModel:
        return aside(lambda: random_llama(options.shape, vocabulary_size, options.device))

    ways = ways_of(load(), load(), tokenizer)
    for label, batches in workloads.items():
        contests.hold(label, ways, batches)
    noise = [[task] for task in noise_tasks(len(tokenizer), options.cases, size)]
    medians = contests.hold(
        "nothing_to_copy", {drafter: ways[drafter] for drafter in ("autoregressive", "combined")}, noise
    )
    pairs = zip(medians["combined"], medians["autoregressive"], strict=True)
    shares = [one.seconds_per_token / other.seconds_per_token for one, other in pairs]
    contests.results["nothing_to_copy"] = {
        "combined_over_autoregressive_seconds": round(statistics.median(shares), 4)
    }


def _pretrained_model(contests: _Contests, chat: ChatLocal, num_cases: int, max_tokens: int) -> None:
    """The workloads of the pretrained model: free generation, in float32 and in bf16."""
    num_kinds = len(QUOTING_REQUESTS)
    prompts = [[task] for task in quoting_prompts(chat, num_kinds * num_cases, max_tokens)]
    ways = ways_of(chat.engine.model, aside(lambda: _copy_of(chat, torch.float32)), chat.engine.tokenizer)
    medians = contests.hold("unforced", ways, prompts)
    if len({tuple(run.token_ids for run in runs) for runs in medians.values()}) != 1:
        raise RuntimeError("the decoding methods gave different answers in float32")
    contests.results["unforced_by_kind"] = {
        kind: ratios({way: runs[number::num_kinds] for way, runs in medians.items()}, end_to_end=False)
        for number, kind in enumerate(QUOTING_REQUESTS)
    }
    half = aside(lambda: _copy_of(chat, torch.bfloat16))
    many = quoting_prompts(chat, 4 * num_cases, max_tokens)
    contests.results["bfloat16"] = bfloat16_report(half, chat.engine.tokenizer, many)


def _copy_of(chat: ChatLocal, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of the pretrained model, for methods that must not share the engine's."""
    model: PreTrainedModel = copy.deepcopy(cast("Any", chat.engine.model)).to(dtype)
    model.set_attn_implementation("sdpa")
    return model


def _table(results: dict[str, Any]) -> Table:
    table = Table(
        "workload", "drafter", "over greedy", "over prompt lookup", "tokens per forward", "end to end"
    )
    for workload, figures in results.items():
        if f"{workload}_end_to_end" not in results:
            continue
        whole = results[f"{workload}_end_to_end"]
        for drafter, figure in figures.items():
            table.add_row(
                workload,
                drafter,
                f"{figure['over_transformers_greedy']:.2f}",
                f"{figure['over_prompt_lookup']:.2f}",
                f"{figure['tokens_per_forward']:.2f}",
                f"{whole[drafter]['over_transformers_greedy']:.2f}",
            )
    return table


if __name__ == "__main__":
    main()
