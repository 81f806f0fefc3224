"""Command line of training: ``python -m local_backend.training``.

``tune`` goes from prompts to a tuned model; ``collect`` is its first stage alone.
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
    collect = commands.add_parser("collect", help="decode prompts and store the trajectories")
    for command in (tune, collect):
        command.add_argument(
            "--model", required=True, help='folder or name of a transformers causal LM, or "default"'
        )
        command.add_argument("--device", default="auto", help='e.g. "cpu"; by default a GPU if there is one')
        command.add_argument("--block-size", type=int, default=24, help="guesses in flight (%(default)s)")
        command.add_argument("--max-tokens", type=int, default=256, help="of an answer (%(default)s)")
        command.add_argument(
            "--prompts",
            required=True,
            help='JSON lines with "prompt", "question", "messages" or "prompt_ids", or a datasets dataset',
        )
        command.add_argument(
            "--template",
            type=lambda text: text.replace("\\n", "\n"),  # a shell passes the two characters of the escape
            help='user message with fields of other records, e.g. "{passage}\\n\\n{question}"',
        )
        command.add_argument("--limit", type=int, help="only the first so many prompts")
    add = tune.add_argument
    add("--output", type=Path, required=True, help="folder of the tuned model")
    add("--steps", dest="num_steps", type=int, default=400, help="optimizer steps of a round (%(default)s)")
    add("--batch-size", type=int, default=16, help="examples of a forward (%(default)s)")
    add("--accumulation-steps", type=int, default=1, help="forwards of a step (%(default)s)")
    add("--learning-rate", type=float, default=1e-3, help="at its peak (%(default)s)")
    add("--lora-rank", type=int, help="train adapters of this rank, not all weights")
    add("--float32", action="store_true", help="no bf16 mixed precision")
    add("--activation-checkpointing", action="store_true", help="less memory, more time")
    add("--global-weight", type=float, default=1.0, help="of its loss (%(default)s)")
    add("--local-weight", type=float, default=0.0, help="of its loss (%(default)s)")
    add("--ar-weight", type=float, default=1.0, help="of the AR loss (%(default)s)")
    add("--stored-share", type=float, default=0.5, help="of copies from trajectories (%(default)s)")
    add("--save-steps", type=int, default=100, help="between checkpoints (%(default)s)")
    add("--rounds", dest="num_rounds", type=int, default=2, help="collections of trajectories (%(default)s)")
    add("--examples", help='JSON lines or a dataset with "answer", too, to learn from as it is')
    add("--max-hours", type=float, help="stop after this long; the same command trains the model further")
    add("--held-out", dest="num_held_out", type=int, default=64, help="prompts for measuring (%(default)s)")
    collect.add_argument("--output", type=Path, required=True, help="folder of the trajectories")
    collect.add_argument("--rows", type=int, default=64, help="answers decoded at once (%(default)s)")
    collect.add_argument("--answers-only", action="store_true", help="store no guesses: takes less time")
    return parser


def _tune(given: argparse.Namespace) -> None:
    training.tune(
        given.model,
        given.prompts,
        given.output,
        _options(given),
        limit=given.limit,
        examples=given.examples,
        template=given.template,
        device=given.device,
    )


def _collect(given: argparse.Namespace) -> None:
    options = training.CollectOptions(
        block_size=given.block_size,
        max_tokens=given.max_tokens,
        max_rows=given.rows,
        with_iterates=not given.answers_only,
    )
    model, tokenizer = training.load_for_training(given.model, given.device)
    prompts = training.read_prompts(
        given.prompts,
        tokenizer,
        **prompt_limits(model),
        max_tokens=given.max_tokens,
        limit=given.limit,
        template=given.template,
    )
    print(json.dumps(training.collect_trajectories(model, tokenizer, prompts, given.output, options)))


def _options(given: argparse.Namespace) -> training.TuneOptions:
    names = {field.name for field in fields(training.TuneOptions)}
    return training.TuneOptions(
        **{name: value for name, value in vars(given).items() if name in names},
        bf16=not given.float32 and bf16_is_fast(),
        noise=training.NoiseOptions(block_size=given.block_size, stored_share=given.stored_share),
        losses=training.LossOptions(given.global_weight, given.local_weight, given.ar_weight),
        collect=training.CollectOptions(
            block_size=given.block_size, max_tokens=given.max_tokens, with_iterates=given.stored_share > 0
        ),
    )


if __name__ == "__main__":
    main()
