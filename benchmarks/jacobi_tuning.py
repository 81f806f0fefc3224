"""Consistency training of a pretrained model on three uses: the gain, what does it, and a lossless variant.

``uses`` tunes the model for each use (resumable, in ``build/uses``) and decodes held-out requests, which
share no names, wordings or tables with those it was trained on, one by one with every method: the plain model
without drafts (the baseline), with Jacobi and with reference copy; the tuned model without drafts, with
Jacobi, with reference copy and with both (``combined``). ``ablation`` trains with one ingredient changed at a
time and replays the plain model's answers. ``lossless`` trains adapters that are active at guessed positions
alone: plain weights verify, so that answers stay what they are; each forward is twice as wide.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decoding_ways import BASELINE, Prompt, Way, engine_way, run_alternating
from benchmarks.jacobi_adapters import GatedForward, add_adapters
from benchmarks.jacobi_prompts import rouge_l
from benchmarks.jacobi_tasks import TASKS
from benchmarks.jacobi_uses import USES, Request, Use, use_of
from benchmarks.results import save
from local_backend import Completion, Drafter, Jacobi, ReferenceCopy
from local_backend.drafting import Combined
from local_backend.models.loading import bf16_is_fast
from local_backend.training import (
    CollectOptions,
    NoiseOptions,
    Training,
    TuneOptions,
    load_for_training,
    perplexity,
    prepare,
    read_prompts,
    tune,
)
from local_backend.training.answers import decode_greedily
from local_backend.training.packing import Text, Texts, pack
from local_backend.training.streams import Streams
from local_backend.training.trainer import answer_tokens
from local_backend.training.tuning import prompt_limits

_HELD_OUT = 48
_MOST_FORWARDS = 200  # of a replay


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the three commands; prints a table, then one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jacobi_tuning", description=__doc__)
    parser.add_argument("command", choices=("uses", "ablation", "lossless"))
    parser.add_argument("--model", default="default", help="as of `tune` (%(default)s)")
    parser.add_argument("--device", default="auto", help="as of `tune` (%(default)s)")
    parser.add_argument(
        "--uses",
        nargs="+",
        choices=(*USES, *TASKS),
        default=tuple(USES),
        help="of a chat model, or a task whose model `benchmarks.jacobi_tasks` trains (%(default)s)",
    )
    parser.add_argument("--prompts", type=int, default=6144, help="to train on (%(default)s)")
    parser.add_argument("--cases", type=int, default=_HELD_OUT, help="held-out requests (%(default)s)")
    parser.add_argument("--steps", type=int, default=TuneOptions.num_steps, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=TuneOptions.batch_size, help="(%(default)s)")
    parser.add_argument(
        "--learning-rate", type=float, default=TuneOptions.learning_rate, help="(%(default)s)"
    )
    parser.add_argument("--rank", type=int, default=64, help="of lossless adapters (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("build/uses"), help="folder of the models")
    parser.add_argument("--threads", type=int, default=1, help="threads of every method (%(default)s)")
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    command = {"uses": tune_use, "ablation": ablate, "lossless": tune_lossless}[given.command]
    results = {name: command(USES.get(name) or use_of(TASKS[name]), given) for name in given.uses}
    for name, rows in results.items():
        columns = list(dict.fromkeys(key for row in rows.values() for key in row))
        table = Table(name, *columns)
        for label, row in rows.items():
            table.add_row(label, *(str(row.get(column, "")) for column in columns))
        Console(stderr=True, width=150).print(table)
    summary = {"command": given.command, "model": given.model, "threads": given.threads, "uses": results}
    if given.save:
        save(f"jacobi_tuning_{given.command}", summary, [])
    print(json.dumps(summary))


def _options(use: Use, given: argparse.Namespace) -> TuneOptions:
    return TuneOptions(
        num_steps=given.steps,
        batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        num_held_out=given.cases,
        collect=CollectOptions(use.max_tokens),
    )


# Three uses ---------------------------------------------------------------------------------------


def tune_use(use: Use, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Tune the model for a use and decode its held-out requests with every method."""
    folder = given.output / use.name
    learned, held_out = use.some("train", given.prompts), use.some("held_out", given.cases)

    def quality(_: Any) -> Any:
        def score(completions: Sequence[Completion]) -> float:
            return statistics.mean(
                use.score(request, one.text) for request, one in zip(held_out, completions, strict=True)
            )

        return score

    started = time.perf_counter()
    report = tune(
        given.model,
        [request.record() for request in learned],
        folder,
        _options(use, given),
        held_out=[request.record() for request in held_out],
        quality=quality,
        device=given.device,
        tell=lambda line: Console(stderr=True).print(line),
    )
    seconds = time.perf_counter() - started
    rows = _compare(use, given, folder, held_out)
    rows["jacobi, tuned"] |= {
        "perplexity": round(report.tuned.perplexity / report.plain.perplexity, 4),
        "kept step": report.kept_step,
        "seconds of tuning": round(seconds),
    }
    return rows


def _compare(
    use: Use, given: argparse.Namespace, folder: Path, held_out: Sequence[Request]
) -> dict[str, dict[str, Any]]:
    plain, tokenizer = load_for_training(given.model, given.device)
    tuned, _ = load_for_training(folder, given.device)
    prompts = _prompts(plain, tokenizer, held_out, use.max_tokens)
    block = NoiseOptions().block_size
    drafters: dict[str, tuple[Any, str | Drafter]] = {
        BASELINE: (plain, "autoregressive"),
        "jacobi": (plain, Jacobi(block, num_recycled=0)),
        "reference copy": (plain, ReferenceCopy()),
        "autoregressive, tuned": (tuned, "autoregressive"),
        "jacobi, tuned": (tuned, Jacobi(block, num_recycled=0)),
        "reference copy, tuned": (tuned, ReferenceCopy()),
        "combined, tuned": (tuned, Combined([ReferenceCopy(), Jacobi(block, num_recycled=0)])),
    }
    ways: dict[str, Way] = {}
    with ExitStack() as engines:
        for name, (model, drafter) in drafters.items():
            copies = name.startswith(("reference", "combined"))
            way, engine = engine_way(model, tokenizer, drafter, use.max_tokens, with_references=copies)
            ways[name] = way
            engines.enter_context(engine)
        asked = [Prompt(prompt, [request.source]) for prompt, request in zip(prompts, held_out, strict=True)]
        run_alternating(use.name, ways, asked)
    plain_answers = [one.token_ids for one in ways[BASELINE].decoded]
    return {
        name: {
            "tokens a forward": round(way.tokens_per_forward, 2),
            "speed": round(way.tokens_per_second / ways[BASELINE].tokens_per_second, 2),
            "score": round(statistics.mean(map(use.score, held_out, way.texts)), 3),
            "same answers": round(
                statistics.mean(
                    one.token_ids == other for one, other in zip(way.decoded, plain_answers, strict=True)
                ),
                2,
            ),
            "ROUGE-L": round(
                statistics.mean(
                    rouge_l(one.token_ids, other)
                    for one, other in zip(way.decoded, plain_answers, strict=True)
                ),
                3,
            ),
        }
        for name, way in ways.items()
    }


def _prompts(model: Any, tokenizer: Any, requests: Sequence[Request], max_tokens: int) -> list[list[int]]:
    records = [request.record() for request in requests]
    return read_prompts(records, tokenizer, **prompt_limits(model), max_tokens=max_tokens)


# Replays of known answers -------------------------------------------------------------------------


def replay(training: Training, texts: Sequence[Text], block_size: int) -> float:
    """Tokens a forward that lands plain answers whose guesses the trained model makes.

    All answers at once and every forward from the beginning, which is simple and, on a CPU, slow. Where a
    model's own answers differ from the plain one's this is too low.
    """
    laid_out = Texts.of(texts, training.device)
    streams = Streams(laid_out, NoiseOptions(block_size, 1, drawn_share=0.0))
    streams.state["is_over"][:] = False
    random = torch.Generator(training.device).manual_seed(0)
    teacher = answer_tokens(laid_out)
    every = torch.arange(len(laid_out), device=training.device)
    behind = laid_out.token_ids.gather(1, laid_out.num_prompt[:, None] - 1)
    streams.state["guesses"][:] = behind[..., None]
    num_forwards = torch.zeros(len(laid_out), dtype=torch.long)
    for _ in range(_MOST_FORWARDS):
        starts = streams.state["starts"][:, 0]
        going = every[starts < laid_out.num_answer]
        if not len(going):
            break
        num_forwards[going.cpu()] += 1
        for group in laid_out.groups:
            rows = going[(going >= group.first) & (going < group.stop)]
            for some in rows.split(16) if len(rows) else ():
                copies = streams.copies(some, random)
                batch = pack(laid_out, some, group, copies)
                precision = torch.autocast(some.device.type, torch.bfloat16, enabled=bf16_is_fast())
                with torch.no_grad(), precision:
                    _, predicted = training.forward.loss(batch, teacher)
                guessed = predicted[:, group.num_answer :].view_as(copies.guesses)
                streams.advance(some, copies, guessed, random)
                streams.state["is_over"][some] = False
    return float(laid_out.num_answer.sum()) / float(num_forwards.sum())


def _train(training: Training, given: argparse.Namespace, label: str) -> dict[str, float]:
    started, figures = time.perf_counter(), {}
    for number in range(given.steps):
        figures = training.step()
        if number % 10 == 9:
            Console(stderr=True).print(
                label, number + 1, {key: round(each, 3) for key, each in figures.items()}
            )
    return {"seconds": round(time.perf_counter() - started), "loss": round(figures.get("loss", math.nan), 3)}


def _answered(
    model: Any, tokenizer: Any, use: Use, given: argparse.Namespace
) -> tuple[list[Text], list[Text]]:
    """The plain model's answers to train on and to replay; of all, ended or not."""
    texts: list[list[Text]] = []
    for requests in (use.some("train", given.prompts), use.some("held_out", given.cases)):
        prompts = _prompts(model, tokenizer, requests, use.max_tokens)
        answers = []
        for first in range(0, len(prompts), 256):
            answers += decode_greedily(model, tokenizer, prompts[first : first + 256], use.max_tokens)
        texts.append(list(zip(prompts, answers, strict=True)))
    return texts[0], texts[1]


def ablate(use: Use, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Train with one ingredient changed at a time."""
    recipe = _options(use, given)
    variants = {
        "recipe": recipe,
        "no teacher": replace(recipe, num_likely=0),
        "no streams": replace(recipe, noise=replace(recipe.noise, drawn_share=1.0)),
        "AR weight 1": replace(recipe, ar_weight=1.0),
        "ended answers alone": recipe,
    }
    model, tokenizer = load_for_training(given.model, given.device)
    learned, held_out = _answered(model, tokenizer, use, given)
    plain_perplexity = perplexity(model, held_out)
    _, plain = prepare(model, learned, replace(recipe, num_likely=0), given.output, tell=_ignore)
    rows: dict[str, dict[str, Any]] = {
        "plain": {"tokens a forward": round(replay(plain, held_out, recipe.noise.block_size), 3)}
    }
    for number, (label, options) in enumerate(variants.items()):
        model, _ = load_for_training(given.model, given.device)
        is_all = label != "ended answers alone"
        kept = [text for text in learned if is_all or text[1][-1] == tokenizer.eos_token_id]
        if not kept:
            rows[label] = {"texts": 0}
            continue
        work = given.output / use.name / f"ablation-{number}-{given.prompts}"
        _, training = prepare(model, kept, options, work, tell=_ignore)
        trained = _train(training, given, label)
        model.eval()
        rows[label] = {
            "tokens a forward": round(replay(training, held_out, options.noise.block_size), 3),
            "perplexity": round(perplexity(model, held_out) / plain_perplexity, 4),
            "texts": len(kept),
            **trained,
        }
        Console(stderr=True).print(label, rows[label])
    return rows


def _ignore(_: str) -> None:
    """Progress of no interest."""


# Adapters at guessed positions alone --------------------------------------------------------------


def tune_lossless(use: Use, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Train adapters that guess for the plain model, which verifies: tokens a forward of its own answers."""
    model, tokenizer = load_for_training(given.model, given.device)
    learned, held_out = _answered(model, tokenizer, use, given)
    options = replace(_options(use, given), ar_weight=0.0)
    work = given.output / use.name / f"lossless-{given.prompts}"
    _, plain = prepare(model, learned, options, work, tell=_ignore)
    before, likeliest = perplexity(model, held_out), plain_teacher(work)
    rows: dict[str, dict[str, Any]] = {
        "plain": {"tokens a forward": round(replay(plain, held_out, options.noise.block_size), 3)}
    }
    gate = add_adapters(model, given.rank)
    training = Training(model, model, Texts.of(learned, model.device), likeliest, options)
    training.forward = GatedForward(model, gate)
    trained = _train(training, given, "lossless")
    model.eval()
    landed = round(replay(training, held_out, options.noise.block_size), 3)
    Console(stderr=True).print(rows, landed)
    gate[0] = torch.zeros(1, 1, 1, device=model.device)  # verified by the plain weights
    rows["adapters at guesses"] = {
        "tokens a forward": landed,
        "perplexity": round(perplexity(model, held_out) / before, 6),
        "rank": given.rank,
        **trained,
    }
    return rows


def plain_teacher(work: Path) -> Any:
    """The teacher that :func:`prepare` has stored."""
    return torch.load(work / "teacher.pt")


if __name__ == "__main__":
    main()
