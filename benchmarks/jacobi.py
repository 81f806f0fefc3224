"""What consistency training brings, task by task, on held-out prompts: every way of decoding side by side.

For each prompt in turn each way decodes it alone (batch 1): the tuned model autoregressively, which is the
baseline, then by Jacobi, lookahead and combined drafts, the plain model by Jacobi, and ``transformers``' own
assisted decoding with a smaller draft model. Quality is scored as the task scores: SQL and Python by running
them. What the plain model says is what its Jacobi drafts bring, which change nothing. Where texts differ
between models, speed is compared as tokens a second, the prompt's reading included; ``decode_speedup`` leaves
out the prompt and each answer's first forward, which weigh little in long answers. Every engine keeps what
prompts begin with, so that a schema is read once. Jacobi verifies whole drafts, so that its tokens a forward
are a figure of the model; combined drafts are cut, as by default, to what pays on this machine. All of it
runs on one thread: for models so small a second one brings little, and the helpers of so many engines in one
process, more than there are cores, would slow down all of them.

The tasks' models are made by ``python -m benchmarks.jacobi_tasks train NAME``; a task whose models are
not there is left out, and the summary says so. ``pretrained`` is any model as it is (``--model``) on
questions and on requests that quote documents (``cited``), every drafter beside autoregressive decoding.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.decoding_ways import (
    BASELINE,
    WAYS,
    Prompt,
    Way,
    assisted_way,
    engine_way,
    figures_of,
    run_alternating,
    share_the_same,
    trajectory_counts,
    tuned_and_plain_ways,
)
from benchmarks.jacobi_tasks import TASKS, draw_cases
from benchmarks.results import save
from benchmarks.workloads import add_model_argument, document_request, questions, repeats_itself
from local_backend.integrations.chat_format import chat_prompt
from local_backend.models.loading import load

_MODELS = Path("build/tasks")
_MAX_TOKENS = 160
_PLAIN = "jacobi_plain"  # the one way of the plain model
_BLOCK_SIZE = 23
_NUM_ASSISTED = 100  # cases; each takes it longer than all other ways together
Measured = tuple[dict[str, Any], list[dict[str, Any]]]  # a task's entry of the summary; its cases


def measure_task(name: str, folder: Path, num_cases: int, block_size: int) -> Measured:
    """Decode a task's held-out cases in every way.

    Raises:
        FileNotFoundError: The task's models are not there.
    """
    _check_models(folder, f"python -m benchmarks.jacobi_tasks train {name}")
    task = TASKS[name]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "plain")
    plain, tuned = _load(folder / "plain"), _load(folder / "tuned")
    cases = list(islice(draw_cases(task, "test"), num_cases))
    prompts = [Prompt(tokenizer.encode(case.prompt, add_special_tokens=False)) for case in cases]
    ways, engines = tuned_and_plain_ways(plain, tuned, tokenizer, block_size, _MAX_TOKENS)
    try:
        run_alternating(name, ways, prompts)
        assisted = _assisted(folder, tokenizer, prompts[:_NUM_ASSISTED])
    finally:
        for engine in engines:
            engine.close()
    right = {
        "plain": task.score(cases, ways[_PLAIN].texts),
        "tuned": task.score(cases, ways[BASELINE].texts),
    }
    entry = {
        **figures_of(ways),
        "quality": {kind: round(statistics.mean(scores), 4) for kind, scores in right.items()},
        "block_size": block_size,
        "trajectories": trajectory_counts(tuned, tokenizer, prompts, block_size, _MAX_TOKENS),
    }
    if assisted:
        entry["assisted"] = assisted
    return entry, [
        {
            "prompt": case.prompt,
            "answer": ways[BASELINE].texts[number],
            "right": {kind: bool(scores[number]) for kind, scores in right.items()},
        }
        for number, case in enumerate(cases)
    ]


def _assisted(folder: Path, tokenizer: Any, prompts: Sequence[Prompt]) -> dict[str, float] | None:
    """``transformers``' assisted decoding beside the baseline on some prompts; needs a draft model."""
    if not (folder / "draft" / "config.json").exists():
        return None
    tuned = _load(folder / "tuned")
    baseline, engine = engine_way(tuned, tokenizer, "autoregressive", _MAX_TOKENS)
    # A copy of the tuned model: the forwards of this one are counted.
    assisted = assisted_way(_load(folder / "tuned"), _load(folder / "draft"), tokenizer, _MAX_TOKENS)
    with engine:
        run_alternating("assisted", {BASELINE: baseline, "assisted": assisted}, prompts)
    return {
        "num_cases": len(prompts),
        "tokens_per_forward": round(assisted.tokens_per_forward, 3),
        "speedup": round(assisted.tokens_per_second / baseline.tokens_per_second, 3),
    }


def measure_pretrained(
    name: str | None, num_cases: int, block_size: int, max_tokens: int = _MAX_TOKENS
) -> Measured:
    """A model as it is, on questions and on requests that quote documents, half of each.

    The latter are also decoded with the documents as references: the cited ones.

    Args:
        name: Of the model; ``None`` is the default one.
        num_cases: Prompts.
        block_size: Jacobi's.
        max_tokens: Of an answer.
    """
    model, tokenizer = load(name, dtype=torch.float32)
    asked = [[{"role": "user", "content": question}] for question in questions(num_cases // 2)]
    quoting = [
        document_request(random.Random(f"jacobi {number}")) for number in range(num_cases - len(asked))
    ]
    prompts = [Prompt(chat_prompt(tokenizer, turns)[0]) for turns in asked]
    cited = [Prompt(chat_prompt(tokenizer, turns)[0], [turns[0]["content"]]) for turns in quoting]
    ways, engines = tuned_and_plain_ways(None, model, tokenizer, block_size, max_tokens)
    copying: dict[str, Way] = {}
    for kind in ("reference_copy", "combined"):
        copying[kind], engine = engine_way(model, tokenizer, kind, max_tokens, with_references=True)
        engines.append(engine)
    try:
        run_alternating("questions", ways, prompts)
        run_alternating("documents", {**ways, **copying}, cited)
    finally:
        for engine in engines:
            engine.close()
    copying[BASELINE] = ways[BASELINE].last(len(cited))  # which copies nothing from references
    figures = figures_of(ways)
    for key in ("tokens_per_forward", "speedup", "decode_speedup"):  # nobody tuned it
        figures[key] = {kind.removesuffix("_tuned"): value for kind, value in figures[key].items()}
    entry = {
        **figures,
        "model": name or "default",
        "quality": {},
        "block_size": block_size,
        "repeat_themselves": sum(repeats_itself(one.token_ids) for one in ways[BASELINE].decoded),
        "cited": {
            "same_as_autoregressive": share_the_same(list(copying.values()), copying[BASELINE]),
            "tokens_per_forward": {kind: round(way.tokens_per_forward, 3) for kind, way in copying.items()},
            "speedup": {
                kind: round(way.tokens_per_second / copying[BASELINE].tokens_per_second, 3)
                for kind, way in copying.items()
            },
        },
    }
    return entry, [{"answer": text} for text in ways[BASELINE].texts]


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _check_models(folder: Path, command: str) -> None:
    missing = [kind for kind in ("plain", "tuned") if not (folder / kind / "config.json").exists()]
    if missing:
        raise FileNotFoundError(f"{folder} holds no {' and no '.join(missing)} model: {command}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jacobi", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=(*TASKS, "pretrained"), help="only these")
    parser.add_argument("--models", type=Path, default=_MODELS, help="folder of the tasks' models")
    add_model_argument(parser)
    parser.add_argument("--max-tokens", type=int, default=_MAX_TOKENS, help="of a pretrained model's answer")
    parser.add_argument("--cases", type=int, default=500, help="held-out cases of a task (%(default)s)")
    parser.add_argument(
        "--block-size",
        type=int,
        default=_BLOCK_SIZE,
        help="Jacobi's block (%(default)s: with the last token, a width at which forwards are not padded)",
    )
    parser.add_argument("--threads", type=int, default=1, help="of every way (%(default)s)")
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    records: list[dict[str, Any]] = []
    for name in options.tasks or (*TASKS, "pretrained"):
        try:
            if name == "pretrained":
                results[name], cases = measure_pretrained(
                    options.model, options.cases, options.block_size, options.max_tokens
                )
            else:
                results[name], cases = measure_task(
                    name, options.models / name, options.cases, options.block_size
                )
            records += [{"task": name, **case} for case in cases]
        except FileNotFoundError as error:
            left_out[name] = str(error)
    if not results:
        parser.error("; ".join(left_out.values()))
    _print_table(results)
    summary: dict[str, Any] = {"tasks": results, "threads": options.threads}
    if left_out:
        summary["left_out"] = left_out
    if options.save:
        save("_".join(["jacobi", *(options.tasks or ())]), summary, records)
    print(json.dumps(summary))


def _print_table(results: dict[str, Any]) -> None:
    table = Table("task", *(f"{way}\ntokens/forward, speed-up" for way in WAYS), "quality\nplain, tuned")
    for name, entry in results.items():
        per_forward, speedup = entry["tokens_per_forward"], entry["speedup"]
        shown = [way if way in speedup else way.removesuffix("_tuned") for way in WAYS]
        figures = (
            f"{per_forward[way]:.2f}  {speedup[way]:.2f}x" if way in speedup else "not measured"
            for way in shown
        )
        table.add_row(name, *figures, "  ".join(f"{share:.3f}" for share in entry["quality"].values()))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
