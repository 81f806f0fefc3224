"""Command line of length prediction: ``python -m local_backend.lengths``.

``train`` learns from prompts and the lengths of their answers, ``evaluate`` measures prediction errors.
DATA is JSON lines with a ``prompt``, ``messages`` or ``prompt_ids`` and ``num_tokens``, e.g. what an engine
logged (:class:`~local_backend.lengths.length_log.LengthLog`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from local_backend.lengths.length_log import LengthExample
    from local_backend.scheduling.lengths import LengthPredictor, Prediction


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; user errors exit with a message and status 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        {"train": _train, "evaluate": _evaluate}[given.command](given)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"{parser.prog} {given.command}: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m local_backend.lengths", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="learn to predict lengths, and say how well it went")
    evaluate = commands.add_parser("evaluate", help="measure a predictor that was trained")
    for command in (train, evaluate):
        command.add_argument("data", type=Path, metavar="DATA", help="JSON lines: a prompt and num_tokens")
        command.add_argument(
            "--model",
            help="folder, GGUF file or hub name of the model that answers; the default one if omitted",
        )
    train.add_argument("--output", type=Path, required=True, help="folder for what is learned")
    train.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--predictor", type=Path, required=True, help="folder that train wrote")
    return parser


def _train(given: argparse.Namespace) -> None:
    from local_backend.lengths.quantiles import MIN_EXAMPLES
    from local_backend.lengths.trained import HiddenStates, TrainedLengths

    model, examples = _load(given)
    learned, held_out = _split(examples, given.seed)
    if len(learned) < MIN_EXAMPLES:
        raise ValueError(f"{given.data} holds {len(examples)} answers: give at least {2 * MIN_EXAMPLES}")
    predictor = TrainedLengths.fit(HiddenStates(model), learned, seed=given.seed)
    predictor.save(given.output)
    _report(predictor, learned, held_out)


def _evaluate(given: argparse.Namespace) -> None:
    from local_backend.lengths.trained import HiddenStates, TrainedLengths

    model, examples = _load(given)
    _report(TrainedLengths.load(given.predictor, HiddenStates(model)), examples, examples)


def _load(given: argparse.Namespace) -> tuple[PreTrainedModel, list[LengthExample]]:
    import torch

    from local_backend.lengths.length_log import read_lengths
    from local_backend.models.loading import load

    model, tokenizer = load(given.model, dtype=torch.float32)
    return model.eval(), read_lengths(given.data, tokenizer)


def _split(examples: Sequence[LengthExample], seed: int) -> tuple[list[LengthExample], list[LengthExample]]:
    """Split by prompt: four fifths to train on, one fifth held out."""
    import random

    prompts = sorted({example.prompt_ids for example in examples})
    random.Random(seed).shuffle(prompts)
    held_out = set(prompts[: len(prompts) // 5])
    return (
        [example for example in examples if example.prompt_ids not in held_out],
        [example for example in examples if example.prompt_ids in held_out],
    )


def _report(
    predictor: LengthPredictor, learned: Sequence[LengthExample], measured: Sequence[LengthExample]
) -> None:
    """Print the errors of the predictor and of the best constant as one JSON line."""
    from local_backend.scheduling.lengths import MAX_QUANTILE, LengthErrors, Prediction, quantile_of

    known = [example.num_tokens for example in learned]
    constant = Prediction(quantile_of(known, 0.5), quantile_of(known, MAX_QUANTILE))
    actual = [example.num_tokens for example in measured]
    said: list[Prediction] = [
        prediction or constant
        for prediction in predictor.predict([example.prompt_ids for example in measured])
    ]
    figures = {
        "predictor": asdict(LengthErrors.of(said, actual)),
        "constant": asdict(LengthErrors.of([constant] * len(actual), actual)),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
