"""What consistency training gains, task by task, on held-out prompts, compared across decoding methods.

Every method decodes each prompt alone (batch 1), alternating: the tuned model autoregressively, which is the
baseline, then with Jacobi, lookahead and combined drafts, the plain model with Jacobi drafts, and
``transformers``' own assisted decoding with a smaller draft model. Quality is the task's own score: SQL and
Python are executed. The plain model is scored on its Jacobi answers, because drafts do not change the text.
Texts differ between models, so speed is compared in tokens per second, prefill included; ``decode_speedup``
excludes the prompt and each answer's first forward, which matter little in long answers. Every engine has a
prefix cache, so a schema is prefilled once. Jacobi verifies whole drafts, so its tokens per forward are a
property of the model; combined drafts are cut, as by default, to the width that pays off on this machine.
Everything runs on one thread: a second one gains little for models this small, and the helper threads of so
many engines in one process would outnumber the cores and slow all of them down.

``python -m benchmarks.jacobi_tasks train NAME`` trains a task's models; a task without models is skipped, and
the summary says so. ``pretrained`` runs any model as it is (``--model``) on questions and on requests that
quote documents (``cited``), and compares every drafter with autoregressive decoding.
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
from local_backend.langchain.chat_format import chat_prompt
from local_backend.models.loading import load

_MODELS = Path("build/tasks")
_MAX_TOKENS = 160
_PLAIN = "jacobi_plain"  # the only method run on the plain model
_BLOCK_SIZE = 23
_NUM_ASSISTED = 100  # cases; each takes longer than with all other methods together
Measured = tuple[dict[str, Any], list[dict[str, Any]]]  # a task's entry in the summary; its cases


def measure_task(name: str, folder: Path, num_cases: int, block_size: int) -> Measured:
    """Decode a task's held-out cases with every method.

    Raises:
        FileNotFoundError: The task's models do not exist.
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
    """``transformers``' assisted decoding against the baseline; ``None`` without a draft model."""
    if not (folder / "draft" / "config.json").exists():
        return None
    tuned = _load(folder / "tuned")
    baseline, engine = engine_way(tuned, tokenizer, "autoregressive", _MAX_TOKENS)
    # A separate copy of the tuned model, because its forwards are counted.
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
    """Measure a model as it is, half on questions and half on requests that quote documents.

    The latter are also decoded with the documents as references; these figures are under ``cited``.

    Args:
        name: Name of the model; ``None`` is the default one.
        num_cases: Number of prompts.
        block_size: Block size of Jacobi decoding.
        max_tokens: Maximum length of an answer.
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
    copying[BASELINE] = ways[BASELINE].last(len(cited))  # does not use references
    figures = figures_of(ways)
    for key in ("tokens_per_forward", "speedup", "decode_speedup"):  # this model was not tuned
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
    parser.add_argument("--tasks", nargs="+", choices=(*TASKS, "pretrained"), help="run only these tasks")
    parser.add_argument("--models", type=Path, default=_MODELS, help="folder with the tasks' models")
    add_model_argument(parser)
    parser.add_argument(
        "--max-tokens", type=int, default=_MAX_TOKENS, help="maximum tokens of a pretrained model's answer"
    )
    parser.add_argument("--cases", type=int, default=500, help="held-out cases per task (%(default)s)")
    parser.add_argument(
        "--block-size",
        type=int,
        default=_BLOCK_SIZE,
        help="tokens in Jacobi's block (%(default)s: with the last token, forwards are not padded)",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of every method (%(default)s)")
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
