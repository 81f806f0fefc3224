"""What consistency training brings, task by task, on held-out prompts: every way of decoding side by side.

For each prompt in turn each way decodes it alone (batch 1): the tuned model autoregressively, which is the
baseline, then by Jacobi, lookahead and combined drafts, the plain model by Jacobi, and ``transformers``' own
assisted decoding with a smaller draft model. Quality is scored as the task scores: SQL and Python by running
them. What the plain model says is what its Jacobi drafts bring, which change nothing. Where texts differ
between models, speed is compared as tokens a second, the prompt's reading included; ``decode_speedup`` leaves
out the prompt and each answer's first forward, which weigh little in long answers. Every engine keeps what
prompts begin with, so that a schema is read once. Jacobi verifies whole drafts, so that its tokens a forward
are a figure of the model; combined drafts are cut, as by default, to what pays on this machine, and so are
Jacobi's in ``jacobi_cut``, of the embedded model, whose drafts say what they are worth. All of it
runs on one thread: for models so small a second one brings little, and the helpers of so many engines in one
process, more than there are cores, would slow down all of them.

The models are made by ``python -m local_backend.training.tasks train NAME`` and, the embedded model without
its consistency stage, by ``python -m local_backend.embedded.build --without-consistency --output
build/embedded/plain``. A task whose models are not there is left out, and the summary says so; with
``--without-plain`` the embedded model is measured by itself, without the hour its plain twin takes.
"""

from __future__ import annotations

import argparse
import json
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
from benchmarks.results import save
from local_backend.drafters import Combined, Drafter, Lookahead, ReferenceCopy
from local_backend.embedded import WEIGHTS
from local_backend.embedded.corpus import load_topics
from local_backend.embedded.evaluation import (
    held_out_pairs,
    held_out_phrasings,
    perplexity,
    quotes_the_fact,
    render,
    unseen_documents,
)
from local_backend.training.tasks import TASKS, draw_cases

_MODELS = Path("build/tasks")
_EMBEDDED_PLAIN = Path("build/embedded/plain")
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
    _check_models(folder, f"python -m local_backend.training.tasks train {name}")
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


def measure_embedded(
    tuned_folder: Path, plain_folder: Path | None, num_cases: int, block_size: int
) -> Measured:
    """The embedded model on held-out phrasings and on documents it never saw, half of each.

    Quality is the share of answers that begin with their topic's first heading or quote the fact asked for.
    Answers from documents are also decoded with the documents as references: the cited ones.

    Raises:
        FileNotFoundError: The plain model was not kept.
    """
    if plain_folder is not None and not (plain_folder / "config.json").exists():
        raise FileNotFoundError(
            f"{plain_folder} holds no plain model: python -m local_backend.embedded.build "
            f"--without-consistency --output {plain_folder}, or measure --without-plain"
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(tuned_folder)
    tuned = _load(tuned_folder)
    plain = None if plain_folder is None else _load(plain_folder)
    models = {"tuned": tuned} if plain is None else {"plain": plain, "tuned": tuned}
    topics = load_topics()
    phrasings = held_out_phrasings(topics, min(num_cases // 2, 4 * len(topics)))
    documents = unseen_documents(num_cases - len(phrasings))
    prompts = [Prompt(render(tokenizer, [("user", question)])) for _, question in phrasings]
    cited = [
        Prompt(render(tokenizer, one.messages), [document.text for document in one.case.documents])
        for one in documents
    ]
    num_recycled = 2  # half of the answers quote
    ways, engines = tuned_and_plain_ways(
        plain, tuned, tokenizer, block_size, _MAX_TOKENS, num_recycled=num_recycled
    )
    copying: dict[str, Way] = {}
    combined = Combined([ReferenceCopy(), Jacobi(block_size, num_recycled), Lookahead()])
    drafters: dict[str, str | Drafter] = {"reference_copy": "reference_copy", "combined": combined}
    for kind, drafter in drafters.items():
        copying[kind], engine = engine_way(tuned, tokenizer, drafter, _MAX_TOKENS, with_references=True)
        engines.append(engine)
    cut, engine = engine_way(tuned, tokenizer, Jacobi(block_size, num_recycled), _MAX_TOKENS)
    engines.append(engine)
    alone = {**ways, "jacobi_cut": cut}
    try:
        run_alternating("phrasings", alone, prompts)
        run_alternating("documents", {**alone, **copying}, cited)
    finally:
        for engine in engines:
            engine.close()
    for kind, name in ((BASELINE, BASELINE), ("jacobi", "jacobi_tuned")):
        copying[kind] = ways[name].last(len(cited))  # which copy nothing from references

    def judged(texts: Sequence[str]) -> list[bool]:
        headings = [topic.points[0].heading for topic, _ in phrasings]
        answers, quotations = texts[: len(phrasings)], texts[len(phrasings) :]
        return [
            *(text.startswith(f"1. **{heading}") for text, heading in zip(answers, headings, strict=True)),
            *(quotes_the_fact(tokenizer, text, one) for text, one in zip(quotations, documents, strict=True)),
        ]

    said_by = {"plain": _PLAIN, "tuned": BASELINE}
    right = {kind: judged(ways[said_by[kind]].texts) for kind in models}
    pairs = held_out_pairs(tokenizer, topics)
    entry = {
        **figures_of(ways),
        "quality": {kind: round(statistics.mean(marks), 4) for kind, marks in right.items()},
        "perplexity": {kind: round(perplexity(model, tokenizer, pairs), 4) for kind, model in models.items()},
        "block_size": block_size,
        "jacobi_cut": {
            "tokens_per_forward": round(cut.tokens_per_forward, 3),
            "speedup": round(cut.tokens_per_second / ways[BASELINE].tokens_per_second, 3),
            "same_as_autoregressive": share_the_same([cut], ways[BASELINE]),
        },
        "cited": {
            "same_as_autoregressive": share_the_same(list(copying.values()), copying[BASELINE]),
            "tokens_per_forward": {kind: round(way.tokens_per_forward, 3) for kind, way in copying.items()},
            "speedup": {
                kind: round(way.tokens_per_second / copying[BASELINE].tokens_per_second, 3)
                for kind, way in copying.items()
            },
        },
    }
    return entry, [
        {"answer": text, "right": {kind: marks[number] for kind, marks in right.items()}}
        for number, text in enumerate(ways[BASELINE].texts)
    ]


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _check_models(folder: Path, command: str) -> None:
    missing = [kind for kind in ("plain", "tuned") if not (folder / kind / "config.json").exists()]
    if missing:
        raise FileNotFoundError(f"{folder} holds no {' and no '.join(missing)} model: {command}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jacobi", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=(*TASKS, "embedded"), help="only these")
    parser.add_argument("--models", type=Path, default=_MODELS, help="folder of the tasks' models")
    parser.add_argument("--embedded", type=Path, default=WEIGHTS, help="folder of the embedded model")
    parser.add_argument(
        "--embedded-plain", type=Path, default=_EMBEDDED_PLAIN, help="of the same before it was tuned"
    )
    parser.add_argument(
        "--without-plain", action="store_true", help="measure the embedded model without its plain twin"
    )
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
    for name in options.tasks or (*TASKS, "embedded"):
        try:
            if name == "embedded":
                plain = None if options.without_plain else options.embedded_plain
                results[name], cases = measure_embedded(
                    options.embedded, plain, options.cases, options.block_size
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
        parts = ["jacobi", *(options.tasks or ()), *(["without_plain"] if options.without_plain else [])]
        save("_".join(parts), summary, records)
    print(json.dumps(summary))


def _print_table(results: dict[str, Any]) -> None:
    table = Table("task", *(f"{way}\ntokens/forward, speed-up" for way in WAYS), "quality\nplain, tuned")
    for name, entry in results.items():
        per_forward, speedup = entry["tokens_per_forward"], entry["speedup"]
        figures = (
            f"{per_forward[way]:.2f}  {speedup[way]:.2f}x" if way in speedup else "not measured"
            for way in WAYS
        )
        table.add_row(name, *figures, "  ".join(f"{share:.3f}" for share in entry["quality"].values()))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
