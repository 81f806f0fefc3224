"""Command line of training: ``python -m local_backend.training``.

``tune`` goes from prompts to a tuned model; ``collect`` stores a model's answers, to copy from.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from local_backend import training
from local_backend.models.loading import bf16_is_fast
from local_backend.training.tuning import prompt_limits

_TUNE, _NOISE = training.TuneOptions(), training.NoiseOptions()
_NUMBERS = (
    ("steps", "num_steps", _TUNE.num_steps, "optimizer steps"),
    ("batch-size", "batch_size", _TUNE.batch_size, "examples of a step"),
    ("learning-rate", "learning_rate", _TUNE.learning_rate, "at its peak"),
    ("ar-weight", "ar_weight", _TUNE.ar_weight, "of the clean text's loss; that of the guesses has 1"),
    ("block-size", "block_size", _NOISE.block_size, "guesses of a block"),
    ("streams", "num_streams", _NOISE.num_streams, "blocks of an example in one forward"),
    ("drawn-share", "drawn_share", _NOISE.drawn_share, "of new blocks with drawn noise; 1: every block"),
    ("likely", "num_likely", _TUNE.num_likely, "tokens of the teacher at a place; 0: the answer's alone"),
    ("most-perplexity", "most_perplexity", _TUNE.most_perplexity, "of plain answers, over the plain model's"),
    ("held-out", "num_held_out", _TUNE.num_held_out, "prompts for measuring"),
    ("evaluations", "num_evaluations", _TUNE.num_evaluations, "measurements in training"),
    ("save-steps", "save_steps", _TUNE.save_steps, "steps between two checkpoints"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; user errors exit with a message and status 2."""
    parser = _make_parser()
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        (_tune if given.command == "tune" else _collect)(given)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog} {given.command}: {error}\n")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m local_backend.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    tune = commands.add_parser("tune", help="from prompts to a tuned model")
    collect = commands.add_parser("collect", help="decode prompts and store the answers")
    for command in (tune, collect):
        add = command.add_argument
        add("--model", required=True, help='folder or name of a transformers causal LM, or "default"')
        add("--device", default="auto", help='e.g. "cpu"; by default a GPU if there is one')
        add("--max-tokens", type=int, default=256, help="of an answer (%(default)s)")
        kinds = '"prompt", "question", "messages" or "prompt_ids"'
        add("--prompts", required=True, help=f"JSON lines with {kinds}, or a datasets dataset")
        add(
            "--template",
            type=lambda text: text.replace("\\n", "\n"),  # a shell passes the two characters of the escape
            help='user message with fields of other records, e.g. "{passage}\\n\\n{question}"',
        )
        add("--limit", type=int, help="only the first so many prompts")
    for name, dest, default, about in _NUMBERS:
        tune.add_argument(
            f"--{name}", dest=dest, type=type(default), default=default, help=f"{about} (%(default)s)"
        )
    add = tune.add_argument
    add("--output", type=Path, required=True, help="folder of the tuned model")
    add("--held-out-prompts", dest="held_out", help="measure on these instead of some of the prompts")
    add("--rows-per-forward", type=int, help="examples of a forward, to save memory")
    add("--only-ended", action="store_true", help="learn nothing from answers that do not end")
    add("--lora-rank", type=int, help="train adapters of this rank, not all weights")
    add("--float32", action="store_true", help="no bf16 mixed precision")
    add("--no-compile", dest="compile_layers", action="store_false", default=None, help="compile no layer")
    add("--examples", help='JSON lines or a dataset with "answer", too, to learn from as it is')
    add("--max-hours", type=float, help="stop after this long; the same command trains the model further")
    collect.add_argument("--output", type=Path, required=True, help="folder of the answers")
    collect.add_argument("--rows", type=int, help="answers decoded at once (1024 on a GPU, 32 on a CPU)")
    return parser


def _tune(given: argparse.Namespace) -> None:
    named = {name: vars(given)[name] for name in ("limit", "held_out", "examples", "template", "device")}
    training.tune(given.model, given.prompts, given.output, _options(given), **named)


def _collect(given: argparse.Namespace) -> None:
    model, tokenizer = training.load_for_training(given.model, given.device)
    bounds = {**prompt_limits(model), "max_tokens": given.max_tokens, "limit": given.limit}
    prompts = training.read_prompts(given.prompts, tokenizer, **bounds, template=given.template)
    options = training.CollectOptions(given.max_tokens, given.rows)
    print(json.dumps(training.collect_answers(model, tokenizer, prompts, given.output, options)))


def _options(given: argparse.Namespace) -> training.TuneOptions:
    names = {field.name for field in fields(training.TuneOptions)}
    return training.TuneOptions(
        **{name: value for name, value in vars(given).items() if name in names},
        bf16=not given.float32 and bf16_is_fast(),
        learns_unfinished=not given.only_ended,
        noise=training.NoiseOptions(given.block_size, given.num_streams, given.drawn_share),
        collect=training.CollectOptions(given.max_tokens),
    )


if __name__ == "__main__":
    main()
