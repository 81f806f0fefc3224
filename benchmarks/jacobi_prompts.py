"""What a pretrained model lands a forward on a file's prompts: as it is, copying earlier answers, and tuned.

Prompts are split as ``python -m local_backend.training tune`` splits them. With ``--answers`` the model's own
answers to the prompts that are not held out are collected first, in that folder (resumable):
``reference_copy_answers`` may copy from them, ``reference_copy_fitted_answers`` does so with weights that are
fitted to them, and a tuned model was trained on them. Every method decodes
each held-out prompt alone (batch 1), alternating; the baseline is the plain model without drafts, and speed
is tokens per second from prompt to last token. Jacobi verifies whole drafts, so its tokens per forward are a
property of the model; the others are cut, as by default, to the width that pays off on this machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.copy_fit import fit_to_answers
from benchmarks.decoding_ways import BASELINE, Prompt, Way, engine_way, run_alternating
from benchmarks.results import save
from local_backend import Drafter, Jacobi, ReferenceCopy
from local_backend.drafting import Combined
from local_backend.training import (
    CollectOptions,
    StoredAnswer,
    TuneOptions,
    collect_answers,
    load_for_training,
    read_prompts,
    stored_answers,
)
from local_backend.training.evaluation import likeness
from local_backend.training.tuning import prompt_limits, split_held_out

_BLOCK_SIZE = 16
_NUM_RECYCLED = 3


def plain_ways(
    model: Any, tokenizer: Any, max_tokens: int, *, stored: Sequence[StoredAnswer] = ()
) -> tuple[dict[str, Way], list[Any]]:
    """The methods that need no training, the baseline first, and the engines to close afterwards."""
    drafters: dict[str, str | Drafter] = {
        BASELINE: "autoregressive",
        "jacobi": Jacobi(_BLOCK_SIZE, num_recycled=0),
        "jacobi_recycled": Jacobi(_BLOCK_SIZE, _NUM_RECYCLED, ngram_size=5),
        "reference_copy": ReferenceCopy(),
    }
    if stored:
        fitted = fit_to_answers([(each.prompt_ids, each.answer_ids) for each in stored])
        drafters["reference_copy_answers"] = ReferenceCopy()
        drafters["reference_copy_fitted_answers"] = ReferenceCopy(weights=fitted.weights)
    return _ways(model, tokenizer, drafters, max_tokens)


def tuned_ways(model: Any, tokenizer: Any, max_tokens: int) -> tuple[dict[str, Way], list[Any]]:
    """The methods on a tuned model, and the engines to close afterwards."""
    drafters: dict[str, str | Drafter] = {
        "tuned_autoregressive": "autoregressive",
        "tuned_jacobi": Jacobi(_BLOCK_SIZE, num_recycled=0),
        "tuned_jacobi_recycled": Jacobi(_BLOCK_SIZE, _NUM_RECYCLED, ngram_size=5),
        "tuned_combined_answers": Combined([ReferenceCopy(), Jacobi(_BLOCK_SIZE, num_recycled=0)]),
    }
    return _ways(model, tokenizer, drafters, max_tokens)


def _ways(
    model: Any, tokenizer: Any, drafters: dict[str, str | Drafter], max_tokens: int
) -> tuple[dict[str, Way], list[Any]]:
    ways, engines = {}, []
    for name, drafter in drafters.items():
        ways[name], engine = engine_way(
            model,
            tokenizer,
            drafter,
            max_tokens,
            with_references=name.endswith("answers"),
            whole_drafts="jacobi" in name,
        )
        engines.append(engine)
    return ways, engines


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Collect answers, decode the held-out prompts with every method; the summary, and the cases."""
    model, tokenizer = load_for_training(options.model)
    all_prompts = read_prompts(
        options.prompts,
        tokenizer,
        **prompt_limits(model),
        max_tokens=options.max_tokens,
        limit=options.limit,
        template=options.template.replace("\\n", "\n") if options.template else None,
    )
    train_prompts, held_out = split_held_out(all_prompts, TuneOptions(num_held_out=options.held_out))
    held_out = held_out[: options.cases]
    stored: Sequence[StoredAnswer] = ()
    if options.answers:
        collect = CollectOptions(options.max_tokens)
        collect_answers(model, tokenizer, train_prompts, options.answers, collect)
        stored = [one for one in stored_answers(options.answers, model, tokenizer) if one.has_ended]
    answers = [str(tokenizer.decode(list(one.answer_ids), skip_special_tokens=True)) for one in stored]
    ways, engines = plain_ways(model, tokenizer, options.max_tokens, stored=stored)
    if options.tuned:
        tuned, _ = load_for_training(options.tuned)
        more_ways, more_engines = tuned_ways(tuned, tokenizer, options.max_tokens)
        ways, engines = {**ways, **more_ways}, [*engines, *more_engines]
    try:
        run_alternating("held-out", ways, [Prompt(prompt, answers) for prompt in held_out])
    finally:
        for engine in engines:
            engine.close()
    baseline = ways[BASELINE]
    plain_answers = [one.token_ids for one in baseline.decoded]
    figures = {
        name: {
            "tokens_per_forward": round(way.tokens_per_forward, 3),
            "speedup": round(way.tokens_per_second / baseline.tokens_per_second, 3),
            "decode_speedup": round(way.decode_rate / (baseline.decode_rate or 1.0), 3),
            "same_answers": round(
                sum(one.token_ids == other for one, other in zip(way.decoded, plain_answers, strict=True))
                / len(plain_answers),
                4,
            ),
        }
        for name, way in ways.items()
    }
    summary = {
        "prompts": Path(options.prompts).name,
        "template": options.template,
        "ways": figures,
        "num_held_out": len(held_out),
        "num_answers": len(answers),
        "tokens_per_prompt": round(sum(map(len, held_out)) / len(held_out), 1),
        "tokens_per_answer": round(baseline.num_tokens / len(held_out), 1),
        "threads": torch.get_num_threads(),
        "plain": likeness(model, held_out, plain_answers, plain_answers).perplexity,
    }
    if options.tuned:
        tuned_answers = [one.token_ids for one in ways["tuned_autoregressive"].decoded]
        like = likeness(tuned, held_out, tuned_answers, plain_answers)
        summary["tuned"] = {
            "same_answers": like.same_answers,
            "rouge_l": round(
                statistics.mean(map(rouge_l, tuned_answers, plain_answers)),
                4,
            ),
            "perplexity": round(like.perplexity, 4),
        }
    return summary, [{"answer": text} for text in baseline.texts]


def rouge_l(answer: Sequence[int], reference: Sequence[int]) -> float:
    """ROUGE-L (Lin, 2004) over token ids: F1 of the longest common subsequence; 1 if both are empty."""
    longest = [0] * (len(reference) + 1)  # common with each beginning of the reference
    for token in answer:
        before = 0
        for end, other in enumerate(reference, 1):
            above = longest[end]
            longest[end] = before + 1 if token == other else max(above, longest[end - 1])
            before = above
    total = len(answer) + len(reference)
    return 2 * longest[-1] / total if total else 1.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jacobi_prompts", description=__doc__)
    parser.add_argument("--model", default="default", help="as of `tune` (%(default)s)")
    parser.add_argument("--tuned", type=Path, help="the model that `tune` made of it")
    parser.add_argument("--prompts", required=True, help="as of `tune`")
    parser.add_argument("--template", help="as of `tune`")
    parser.add_argument("--limit", type=int, help="only the first so many prompts")
    parser.add_argument("--held-out", type=int, default=64, help="prompts held out (%(default)s)")
    parser.add_argument("--cases", type=int, help="decode only so many of them")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (%(default)s)")
    parser.add_argument("--answers", type=Path, help="folder of the answers to the other prompts")
    parser.add_argument("--threads", type=int, default=1, help="threads of every method (%(default)s)")
    parser.add_argument("--save", metavar="USE", help="keep a dated file of this use in benchmarks/results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    summary, cases = measure(options)
    table = Table("method", "tokens/forward", "speed-up", "without the prompt", "same answers")
    for name, figures in summary["ways"].items():
        table.add_row(name, *(f"{figures[key]:.2f}" for key in figures))
    Console(stderr=True).print(table)
    if options.save:
        save(f"jacobi_prompts_{options.save}", summary, cases)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
