"""How well the length of an answer can be predicted from its prompt, on a local model's own answers.

The engine answers requests of several kinds, sampled, and logs the length of every answer. A light predictor
(a small network on the model's hidden states over the prompt) learns from three quarters of the log; all
predictors are measured on the prompts of the last quarter, which none has seen. The others are the best
constant, perception in advance (the model is asked; if it names no number, the constant is used), running
quantiles by template and, with ``--embedding``, the same network on a sentence embedding.

The log is kept and resumed after an interruption; every model has its own. Acc-100 of the tuned predictor of
Zheng et al., arXiv 2305.13144, is 0.81 on other prompts and another model, so it is not directly comparable.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.length_errors import LengthErrors, empirical_quantile
from benchmarks.length_training import LengthExample, fit_lengths, read_lengths
from benchmarks.paper_scheduling.perception import PerceptionInAdvance
from benchmarks.results import save
from benchmarks.trained_lengths import HiddenStates, LengthLog
from benchmarks.workloads import add_model_argument, chapters
from local_backend import ChatLocal, Engine, SamplingParams
from local_backend.langchain.chat_format import chat_prompt
from local_backend.offline.jsonl import read_lines
from local_backend.scheduling.lengths import (
    MAX_QUANTILE,
    ObservedLengths,
    Prediction,
)
from local_backend.training import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Embed = Callable[[list[str]], Sequence[Sequence[float]]]
"""Texts to vectors, e.g. the ``embed_documents`` of a LangChain ``Embeddings``."""

PAPER_ACC_100 = 0.81
_LOGS = Path("build") / "length_prediction"
_MIN_TOKENS, _MAX_TOKENS = 5, 256
_CHUNK = 300  # answers logged at once: so many that few of them decode alone at the end
_HELD_OUT_SHARE = 0.25
# Requests about a chapter; some need a line, some a page.
TASKS = {
    "explain": "Explain {title} to a beginner.",
    "line": "Say in one short sentence what this is about: {title}.",
    "list": "List five things to know about {title}.",
    "quote": "Repeat this text: {sentence}",
    "title": "Give a title of at most five words to this text: {sentence}",
    "yes_no": "Answer with yes or no only: is {title} a part of the Python language?",
}


class TextEmbeddings:
    """A sentence embedding of the prompt's text, and the prompt's length.

    Args:
        tokenizer: Decodes prompts into text.
        embed: Texts to vectors.
    """

    name = "embedding"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, embed: Embed) -> None:
        self._tokenizer = tokenizer
        self._embed = embed

    def __call__(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Features ``[prompts, embedding size + 1]``."""
        if not prompts:
            return torch.zeros(0, 0)
        texts = [str(self._tokenizer.decode(list(prompt), skip_special_tokens=True)) for prompt in prompts]
        vectors = torch.tensor([list(vector) for vector in self._embed(texts)], dtype=torch.float32)
        lengths = torch.tensor([[math.log(max(1, len(prompt)))] for prompt in prompts])
        return torch.cat([vectors, lengths], dim=1)


def task_prompts(engine: Engine, count: int) -> list[tuple[str, list[int]]]:
    """Prompts that cycle through the tasks, with task names; fewer prompts are the first of more."""
    prompts: list[tuple[str, list[int]]] = []
    seen: set[str] = set()
    names, number = list(TASKS), 0
    while len(prompts) < count:
        rng = random.Random(f"length prediction {number}")
        task = names[number % len(names)]
        number += 1
        chapter = rng.choice(chapters())
        fields = {"title": chapter.title, "sentence": rng.choice(chapter.sentences)}
        # There are few titles; a random sentence before the request makes it different.
        context = "" if "{sentence}" in TASKS[task] else f"{rng.choice(chapter.sentences)}\n\n"
        request = context + TASKS[task].format(**fields)
        if request not in seen:
            seen.add(request)
            prompts.append((task, chat_prompt(engine.tokenizer, [{"role": "user", "content": request}])[0]))
    return prompts


def write_log(engine: Engine, path: Path, count: int, *, temperature: float) -> None:
    """Let the engine answer ``count`` prompts and log the lengths; resumes after the lines in ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line.content for line in read_lines(path)] if path.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
        path.write_bytes(b"".join(lines))  # drop a line that was cut off
    numbered = list(enumerate(task_prompts(engine, count)))[len(lines) :]
    log = LengthLog(path)
    with Progress(console=Console(stderr=True)) as bar:
        progress = bar.add_task("answers", total=count, completed=len(lines))
        for at in range(0, len(numbered), _CHUNK):
            chunk = numbered[at : at + _CHUNK]
            params = [
                SamplingParams(max_tokens=_MAX_TOKENS, temperature=temperature, seed=number)
                for number, _ in chunk
            ]
            # Long prompts last: a forward is as wide as its longest row.
            order = sorted(range(len(chunk)), key=lambda index: len(chunk[index][1][1]))
            completions = engine.generate(
                [chunk[index][1][1] for index in order], [params[index] for index in order]
            )
            answers = dict(zip(order, completions, strict=True))
            for index, (_, (task, prompt)) in enumerate(chunk):
                log.add(prompt, len(answers[index].token_ids), params[index], task=task)
            bar.update(progress, advance=len(chunk))


def measure(
    engine: Engine,
    examples: Sequence[LengthExample],
    *,
    embed: Embed | None = None,
) -> dict[str, Any]:
    """Errors of every predictor on held-out prompts, and by how much the light predictor's loss is lower.

    Args:
        engine: Engine with the model that answered.
        examples: Prompts and the lengths of its answers.
        embed: A sentence embedding to measure as well.
    """
    shuffled = random.Random(0).sample(list(examples), len(examples))
    num_held_out = round(_HELD_OUT_SHARE * len(shuffled))
    held_out, learned = shuffled[:num_held_out], shuffled[num_held_out:]
    prompts = [example.prompt_ids for example in held_out]
    actual = [example.num_tokens for example in held_out]
    # The best constant on the very answers it is measured on, so no real constant does better.
    constant = Prediction(empirical_quantile(actual, 0.5), empirical_quantile(actual, MAX_QUANTILE))
    observed = ObservedLengths()
    for example in learned:
        observed.observe(example.prompt_ids, example.num_tokens)
    asked = PerceptionInAdvance(engine).predict(prompts)
    predictors: dict[str, Sequence[Prediction | None]] = {
        "constant": [constant] * len(actual),
        "perception": asked,
        "observed": observed.predict(prompts),
        "hidden_state": fit_lengths(HiddenStates(engine.model), learned).predict(prompts),
    }
    if embed is not None:
        features = TextEmbeddings(engine.tokenizer, embed)
        predictors["embedding"] = fit_lengths(features, learned).predict(prompts)
    errors = {
        name: LengthErrors.of([one or constant for one in predictions], actual)
        for name, predictions in predictors.items()
    }
    light = errors["hidden_state"].pinball_loss
    return {
        "predictors": {
            name: {field: round(value, 4) for field, value in asdict(figures).items()}
            for name, figures in errors.items()
        },
        "pinball_under_constant": round(1 - light / errors["constant"].pinball_loss, 4),
        "pinball_under_perception": round(1 - light / errors["perception"].pinball_loss, 4),
        "perception_answered_share": round(sum(one is not None for one in asked) / len(asked), 4),
        "num_learned": len(learned),
        "paper_acc_100": PAPER_ACC_100,
        "median_tokens": empirical_quantile(actual, 0.5),
        "share_at_limit": round(sum(length == _MAX_TOKENS for length in actual) / len(actual), 4),
    }


def _embedding() -> Embed:
    from retrieval_copy import SentenceEmbeddings

    return SentenceEmbeddings().embed_documents


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.length_prediction", description=__doc__)
    add_model_argument(parser)
    parser.add_argument("--prompts", type=int, default=2400, help="prompts to answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="sampling temperature (%(default)s)")
    parser.add_argument("--logs", type=Path, default=_LOGS, help="folder of the logs (%(default)s)")
    parser.add_argument("--embedding", action="store_true", help="also measure a sentence embedding")
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    if options.prompts < 100:
        parser.error(f"--prompts must be at least 100 to learn and to measure, got {options.prompts}")
    torch.manual_seed(0)
    with ChatLocal.from_pretrained(options.model, max_rows=32, dtype=torch.float32) as chat:
        engine = chat.engine
        model_print = fingerprint(engine.model, engine.tokenizer)[:12]
        path = options.logs / f"{model_print}_{options.temperature:g}.jsonl"
        write_log(engine, path, options.prompts, temperature=options.temperature)
        logged = read_lengths(path, engine.tokenizer)[: options.prompts]
        examples = [example for example in logged if example.num_tokens >= _MIN_TOKENS]
        embed = _embedding() if options.embedding else None
        summary = measure(engine, examples, embed=embed)
    _print_table(summary)
    if options.save:
        save("length_prediction", summary, [])
    print(json.dumps(summary))


def _print_table(summary: dict[str, Any]) -> None:
    table = Table("predictor", "pinball loss at 0.9", "within maximum", "mean error", "Acc-50", "Acc-100")
    for name, figures in summary["predictors"].items():
        table.add_row(
            name.replace("_", " "),
            f"{figures['pinball_loss']:.1f}",
            f"{figures['share_within_max']:.2f}",
            f"{figures['mean_absolute_error']:.0f}",
            f"{figures['acc_50']:.2f}",
            f"{figures['acc_100']:.2f}",
        )
    table.add_row("paper (other prompts, other model)", "", "", "", "", f"{PAPER_ACC_100}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
