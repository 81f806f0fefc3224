"""What scheduling by predicted length gains over naive batches, on lengths of real answers.

No model runs: the lengths are known, and the production scheduler decides which rows are in which forward.
The cost of a forward is constant up to 16 rows and linear beyond, or read from ``--cost`` (a file of
``engine.width_costs`` as JSON). The baseline is vanilla: batches in order of arrival, each as long
as its longest answer. It is compared with the parts of sequence scheduling (Zheng et al., arXiv 2305.13144),
each added to bins alone and all together, and with the engine's slots, which refill as rows finish. The slots
are fed as from a file: a row is queued whenever one finishes, and a few slots stay free together so that one
forward prefills several prompts, as in the engine. The ``ablation`` has batches one after another instead
(``groups``), slots refilled at once, perfect lengths, and preemption by the expected remainder.
Preempted rows resume from their KV cache; ``static_all_redone`` restarts them, as the paper does, and
``static_all_by_expected`` bins by expected lengths instead of maxima.

In the engine, finished rows leave the forward, so a large batch of short answers gets cheaper as it runs; the
figures under ``padded`` are for rows that stay until their batch is done, as in the paper.

The predictor sees the other answers to the same prompt (the siblings, drawn at other temperatures).
``python -m benchmarks.length_prediction`` measures predictors that see only the prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from benchmarks.length_errors import LengthErrors
from benchmarks.paper_scheduling.remaining import replay_longest_remaining
from benchmarks.paper_scheduling.replay import Replay, replay_slots, replay_static
from benchmarks.paper_scheduling.static import StaticOptions
from benchmarks.results import save
from local_backend.models.forward_cost import ForwardCost
from local_backend.offline.jsonl import read_lines
from local_backend.scheduling.lengths import Prediction

GENERATED = "t0.7"
SIBLINGS = ("t0.0", "t0.3", "t0.5")
_BATCH_ROWS, _GROUP_ROWS, _MAX_TOKENS = 16, 256, 512
_STUDENT_T = 1.886  # one draw in ten exceeds this; three siblings give two degrees of freedom
_PREDICTOR = (
    "from the siblings: the answers to the same prompt at the other temperatures, which a predictor that "
    "sees the prompt alone does not have"
)


def read_answers(path: Path, *, max_tokens: int = _MAX_TOKENS) -> tuple[list[int], list[list[int]]]:
    """The lengths of the answers, and for each those of its siblings, cut to ``max_tokens``.

    Raises:
        ValueError: There is no line, or one lacks a length; the message names it and what is expected.
    """
    lengths, siblings = [], []
    for line in read_lines(path):
        record = line.record()
        lengths.append(_length(record, GENERATED, line.name, max_tokens))
        siblings.append([_length(record, field, line.name, max_tokens) for field in SIBLINGS])
    if not lengths:
        raise ValueError(f"{path} holds no line: expected JSON lines with {GENERATED}, {', '.join(SIBLINGS)}")
    return lengths, siblings


def _length(record: Any, field: str, name: str, max_tokens: int) -> int:
    value = record.get(field) if isinstance(record, Mapping) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0 or math.isinf(value):
        raise ValueError(
            f"{name} has no length {field!r} (got {value!r}): every line needs the tokens of its answers at "
            f"{GENERATED}, {', '.join(SIBLINGS)}"
        )
    # An empty answer still takes the forward that generates its end token.
    return min(max_tokens, max(1, math.ceil(value)))


def predict_from_siblings(
    siblings: Sequence[Sequence[int]], *, max_tokens: int = _MAX_TOKENS
) -> list[Prediction]:
    """One prediction for each answer, from its siblings alone.

    The expected length is their mean. The maximum is the upper end of the textbook prediction interval for
    one more draw, by Student's t; nothing is fitted to the file.
    """
    predictions = []
    for tokens in siblings:
        mean = min(max_tokens, statistics.mean(tokens))
        margin = _STUDENT_T * statistics.stdev(tokens) * math.sqrt(1 + 1 / len(tokens))
        predictions.append(Prediction(mean, min(max_tokens, mean + margin)))
    return predictions


def measure(
    lengths: Sequence[int],
    predictions: Sequence[Prediction],
    costs: ForwardCost,
    *,
    batch_rows: int = _BATCH_ROWS,
    group_rows: int = _GROUP_ROWS,
    max_tokens: int = _MAX_TOKENS,
) -> dict[str, Any]:
    """Throughput of every policy over vanilla, the share of preempted rows, and the bound of perfect packing.

    Args:
        lengths: Lengths of the answers.
        predictions: One for each answer.
        costs: Cost of a forward.
        batch_rows: Rows of a batch, and slots of the engine.
        group_rows: Rows that are scheduled together; under ``stream``, those in the engine at a time.
        max_tokens: An answer is no longer than this.
    """
    whole = StaticOptions(batch_rows, max_tokens, group_rows)
    bins = replace(whole, variable_batch=False, collect_failures=False, predict_maximum=False)
    replays: dict[str, Replay] = {
        "static_bins": replay_static(lengths, predictions, bins),
        "static_vbs": replay_static(lengths, predictions, replace(bins, variable_batch=True)),
        "static_fcr": replay_static(lengths, predictions, replace(bins, collect_failures=True)),
        "static_all": replay_static(lengths, predictions, whole),
        "static_all_redone": replay_static(lengths, predictions, replace(whole, resume=False)),
        "static_all_by_expected": replay_static(lengths, predictions, replace(whole, predict_maximum=False)),
    }
    slots = partial(replay_slots, lengths, num_slots=batch_rows, group_rows=group_rows, max_tokens=max_tokens)
    engine = partial(slots, is_streamed=True, is_delayed=True)
    replays["slots_first_come"] = engine(predictions, "first_come")
    replays["slots_predicted"] = engine(predictions, "longest_first")
    perfect = [Prediction(length, length) for length in lengths]
    ablation: dict[str, Replay] = {}
    for feed, is_streamed in (("groups", False), ("stream", True)):
        ablation[f"{feed}_first_come"] = slots(predictions, "first_come", is_streamed=is_streamed)
        ablation[f"{feed}_predicted"] = slots(predictions, "longest_first", is_streamed=is_streamed)
        ablation[f"{feed}_perfect"] = slots(perfect, "longest_first", is_streamed=is_streamed)
    ablation["groups_longest_remaining"] = replay_longest_remaining(
        lengths, predictions, num_slots=batch_rows, group_rows=group_rows, max_tokens=max_tokens
    )
    ablation["groups_predicted_delayed"] = slots(predictions, "longest_first", is_delayed=True)
    arrival = StaticOptions.vanilla(batch_rows=batch_rows, max_tokens=max_tokens, group_rows=group_rows)
    vanilla = replay_static(lengths, predictions, arrival)
    seconds = vanilla.cost(costs, padded=True)
    over_vanilla = {name: seconds / replay.cost(costs) for name, replay in replays.items()}
    padded = {
        name: seconds / replay.cost(costs, padded=True)
        for name, replay in replays.items()
        if name.startswith("static")
    }
    # Every slot of every forward is taken, at the average context length.
    context = round(sum(length**2 for length in lengths) / sum(lengths) / 2)
    full_forwards = sum(lengths) / batch_rows
    bound = seconds / (full_forwards * costs(context=context, rows=batch_rows, width=1))
    return {
        "throughput_over_vanilla": {
            name: round(over_vanilla[name], 3)
            for name in (
                "static_bins",
                "static_vbs",
                "static_fcr",
                "static_all",
                "slots_first_come",
                "slots_predicted",
            )
        },
        "failure_share": round(replays["static_all"].num_failures / len(lengths), 4),
        "bound": round(bound, 3),
        "share_of_bound": {
            name: round(over_vanilla[name] / bound, 4) for name in ("slots_first_come", "slots_predicted")
        },
        "ablation": {
            name: round(seconds / replay.cost(costs) / bound, 4) for name, replay in ablation.items()
        },
        "longest_remaining_preempted": ablation["groups_longest_remaining"].num_failures,
        **{name: round(over_vanilla[name], 3) for name in ("static_all_redone", "static_all_by_expected")},
        "padded": {name: round(value, 3) for name, value in padded.items()},
        "vanilla_padding_share": round(vanilla.padding_share(), 3),
        "num_answers": len(lengths),
        "predictor": _PREDICTOR,
        "prediction": {
            name: round(value, 3) for name, value in asdict(_errors(predictions, lengths)).items()
        },
    }


def _errors(predictions: Sequence[Prediction], lengths: Sequence[int]) -> LengthErrors:
    return LengthErrors.of(predictions, lengths)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling", description=__doc__)
    parser.add_argument(
        "--lengths",
        type=Path,
        required=True,
        help=f"JSON lines with the tokens of an answer as {GENERATED}, {', '.join(SIBLINGS)}",
    )
    parser.add_argument("--cost", type=Path, help="JSON of an engine's width_costs")
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    for path in (options.lengths, options.cost):
        if path is not None and not path.exists():
            parser.error(f"{path} does not exist")
    try:
        costs = _costs(options.cost)
        lengths, siblings = read_answers(options.lengths)
    except ValueError as error:
        parser.error(str(error))
    predictions = predict_from_siblings(siblings)
    summary = measure(lengths, predictions, costs)
    _print_table(summary)
    if options.save:
        save(f"scheduling_{options.lengths.stem}", summary, [])
    print(json.dumps(summary))


def _costs(path: Path | None) -> ForwardCost:
    if path is None:
        return ForwardCost.flat(_BATCH_ROWS)
    try:
        return TypeAdapter(ForwardCost).validate_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} holds no costs of forwards ({error!r}): see --help") from error


def _print_table(summary: Mapping[str, Any]) -> None:
    table = Table("policy", "over vanilla", "of the bound", "padded, as in the paper")
    for name, value in (*summary["throughput_over_vanilla"].items(), ("bound", summary["bound"])):
        padded = summary["padded"].get(name)
        table.add_row(
            name.replace("_", " "),
            f"{value:.2f}x",
            f"{value / summary['bound']:.3f}",
            f"{padded:.2f}x" if padded else "",
        )
    console = Console(width=100)
    console.print(table)
    changes = Table("the engine's slots, one change at a time", "of the bound")
    for name, share in (*summary["ablation"].items(), *summary["share_of_bound"].items()):
        changes.add_row(name.replace("_", " "), f"{share:.3f}")
    console.print(changes)
    console.print(f"Predicted {summary['predictor']}.")
    console.print(f"Preempted: {summary['failure_share']:.1%} of the answers, counting every preemption.")


if __name__ == "__main__":
    main()
