"""Trains a predictor of answer length, and measures its errors.

``train`` learns from prompts and the lengths of their answers, ``evaluate`` measures a stored predictor. DATA
is JSON lines with a ``prompt``, ``messages`` or ``prompt_ids`` and ``num_tokens``, e.g. what an engine logged
(:class:`~benchmarks.trained_lengths.LengthLog`). Both print one JSON line: the errors of the predictor
and of the best constant.

The networks predict several quantiles at once, in ascending order by construction, and are trained with the
pinball loss (Koenker and Bassett, "Regression Quantiles", 1978). So the **maximum** over many answers to a
prompt is learned from one answer to each of many prompts.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from benchmarks.length_errors import LengthErrors, empirical_quantile
from benchmarks.trained_lengths import QUANTILES, Features, HiddenStates, QuantileNetwork, TrainedLengths
from local_backend.models.loading import load
from local_backend.offline.jsonl import read_lines
from local_backend.offline.prompt_file import read_prompts
from local_backend.scheduling.lengths import MAX_QUANTILE, LengthPredictor, Prediction

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MIN_EXAMPLES = 20
"""Fewer are too few to hold some out and train on the rest."""

_NO_LIMIT = 2**31
_NUM_NETWORKS = 6  # each fitted on a different split; their quantiles are averaged
_LEARNING_RATE, _WEIGHT_DECAY = 3e-3, 0.02
# Steps over all examples, at most; and those without improvement on held-out examples that end the fit.
_MAX_STEPS, _PATIENCE_STEPS = 400, 60
_HELD_OUT_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class LengthExample:
    """A prompt and the length of one answer to it.

    Attributes:
        prompt_ids: Its token ids.
        num_tokens: Tokens of the answer, the end token included.
    """

    prompt_ids: tuple[int, ...]
    num_tokens: int


def read_lengths(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[LengthExample]:
    """Every prompt with its answer's length, in file order; a truncated last line is skipped.

    Args:
        path: JSON lines; see the module.
        tokenizer: Of the model that answered.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds no example, or a line is invalid. Says which and what to do.
    """
    records = []
    for line in read_lines(Path(path)):
        try:
            record = line.record()
        except ValueError:
            if not line.content.endswith(b"\n"):
                break  # its writer was stopped, or is still writing
            raise
        length = record.get("num_tokens") if isinstance(record, dict) else None
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError(
                f'{line.name} has no "num_tokens" of at least 1 (got {length!r}): '
                "give the number of tokens of its answer"
            )
        records.append(record)
    if not records:
        raise ValueError(f"{path} holds no example: expected one record a line with a prompt and num_tokens")
    prompts = read_prompts(records, tokenizer, max_positions=_NO_LIMIT, max_tokens=0)
    return [
        LengthExample(tuple(prompt), record["num_tokens"])
        for prompt, record in zip(prompts, records, strict=True)
    ]


def fit_lengths(features: Features, examples: Sequence[LengthExample], *, seed: int = 0) -> TrainedLengths:
    """Learn from prompts and the lengths of their answers; the same seed gives the same predictor.

    Raises:
        ValueError: There are too few of them.
    """
    described = features([example.prompt_ids for example in examples])
    lengths = [example.num_tokens for example in examples]
    return TrainedLengths(features, fit_quantiles(described, lengths, seed=seed))


def pinball(predicted: Tensor, actual: Tensor, quantiles: Sequence[float] = QUANTILES) -> Tensor:
    """The mean pinball loss over answers and quantiles.

    Args:
        predicted: ``[answers, quantiles]``.
        actual: ``[answers]``.
        quantiles: The quantile of each column.
    """
    missing = actual[:, None] - predicted  # [answers, quantiles]
    levels = torch.tensor(quantiles, dtype=predicted.dtype, device=predicted.device)
    return torch.maximum(levels * missing, (levels - 1) * missing).mean()


def fit_quantiles(features: Tensor, num_tokens: Sequence[int], *, seed: int = 0) -> list[QuantileNetwork]:
    """Fit networks, with early stopping on held-out examples.

    Args:
        features: ``[answers, features]``.
        num_tokens: The length of each answer.
        seed: Of splits, initial weights and dropout.

    Raises:
        ValueError: There are fewer than :data:`MIN_EXAMPLES` answers, or not one length for each.
    """
    if len(features) != len(num_tokens) or len(features) < MIN_EXAMPLES:
        raise ValueError(
            f"{len(features)} prompts and {len(num_tokens)} lengths: give one length for each of at least "
            f"{MIN_EXAMPLES} prompts"
        )
    features, lengths = features.float(), torch.tensor(num_tokens, dtype=torch.float32)
    num_held_out = max(5, round(_HELD_OUT_SHARE * len(lengths)))
    networks = []
    with torch.random.fork_rng(devices=[]):  # a fit neither depends on other random draws nor changes them
        torch.manual_seed(seed)
        order = torch.randperm(len(lengths))
        for number in range(_NUM_NETWORKS):
            # Each network holds out a different part, so that together they learn from all examples.
            held_out, learned = order.roll(number * num_held_out).tensor_split([num_held_out])
            networks.append(_fit(features[learned], lengths[learned], features[held_out], lengths[held_out]))
    return networks


def _fit(features: Tensor, lengths: Tensor, held_features: Tensor, held_lengths: Tensor) -> QuantileNetwork:
    """A network fitted to ``features`` and ``lengths``, as it was when it was best on those held out."""
    network = _initial_network(features, lengths)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    best, best_step, best_state = math.inf, 0, copy.deepcopy(network.state_dict())
    for step in range(_MAX_STEPS):
        with torch.no_grad():
            loss = float(pinball(network.eval()(held_features), held_lengths))
        if loss < best:
            best, best_step, best_state = loss, step, copy.deepcopy(network.state_dict())
        if step - best_step > _PATIENCE_STEPS:
            break
        optimizer.zero_grad()
        (pinball(network.train()(features), lengths) / lengths.mean()).backward()
        optimizer.step()
    network.load_state_dict(best_state)
    return network


def _initial_network(features: Tensor, lengths: Tensor) -> QuantileNetwork:
    """A network that predicts the quantiles of a normal distribution of logarithms for every prompt."""
    network = QuantileNetwork(features.shape[1])
    last = network.layers[-1]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    with torch.no_grad():
        last.bias.copy_(torch.tensor([-1.3, *[-0.3] * (len(QUANTILES) - 1)]))
    logarithms = lengths.clamp_min(1).log()
    network.centre.copy_(logarithms.mean())
    network.spread.copy_(logarithms.std().clamp_min(0.05))
    network.feature_mean.copy_(features.mean(0))
    network.feature_scale.copy_(features.std(0).clamp_min(1e-6))
    return network


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; user errors exit with a message and status 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        {"train": _train, "evaluate": _evaluate}[given.command](given)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"{parser.prog} {given.command}: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.length_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="learn to predict lengths, and measure on held-out prompts")
    evaluate = commands.add_parser("evaluate", help="measure a stored predictor")
    for command in (train, evaluate):
        command.add_argument("data", type=Path, metavar="DATA", help="JSON lines: a prompt and num_tokens")
        command.add_argument(
            "--model",
            help="folder, GGUF file or hub name of the model that answers; the default one if omitted",
        )
    train.add_argument("--output", type=Path, required=True, help="folder for the predictor")
    train.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--predictor", type=Path, required=True, help="folder that train wrote")
    return parser


def _train(given: argparse.Namespace) -> None:
    model, examples = _load(given)
    learned, held_out = _split(examples, given.seed)
    if len(learned) < MIN_EXAMPLES:
        raise ValueError(f"{given.data} holds {len(examples)} answers: give at least {2 * MIN_EXAMPLES}")
    predictor = fit_lengths(HiddenStates(model), learned, seed=given.seed)
    predictor.save(given.output)
    _report(predictor, learned, held_out)


def _evaluate(given: argparse.Namespace) -> None:
    model, examples = _load(given)
    _report(TrainedLengths.load(given.predictor, HiddenStates(model)), examples, examples)


def _load(given: argparse.Namespace) -> tuple[PreTrainedModel, list[LengthExample]]:
    model, tokenizer = load(given.model, dtype=torch.float32)
    return model.eval(), read_lengths(given.data, tokenizer)


def _split(examples: Sequence[LengthExample], seed: int) -> tuple[list[LengthExample], list[LengthExample]]:
    """Split by prompt: four fifths to train on, one fifth held out."""
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
    known = [example.num_tokens for example in learned]
    constant = Prediction(empirical_quantile(known, 0.5), empirical_quantile(known, MAX_QUANTILE))
    actual = [example.num_tokens for example in measured]
    predictions = predictor.predict([example.prompt_ids for example in measured])
    figures = {
        "predictor": asdict(LengthErrors.of([each or constant for each in predictions], actual)),
        "constant": asdict(LengthErrors.of([constant] * len(actual), actual)),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
