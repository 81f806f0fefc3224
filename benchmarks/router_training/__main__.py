"""Trains and evaluates routers: ``python -m benchmarks.router_training train|evaluate --labels FILE``."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.router_training.calibration_plot import calibration_svg
from benchmarks.router_training.labels import TRAINING, LabelledQuestion, read_labels
from benchmarks.router_training.measures import Confusion, calibration, calibration_error
from benchmarks.router_training.training import TrainingSettings, save_head, train
from sot_chains.router.encoder import Encoder
from sot_chains.router.trained import SHIPPED_HEAD, Features, TrainedRouter


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: Without the program's name; those of the process by default.

    Returns:
        0, or 2 if a file cannot be used (one line on standard error says why).
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (OSError, ValueError) as error:
        print(f"router_training: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router_training", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    labels = "JSON lines with question and use_sot (0 or 1)"
    training = commands.add_parser("train", help="train a router on labelled questions")
    training.add_argument(
        "--labels", type=Path, nargs="+", default=TRAINING, help=f"{labels}; by default our own"
    )
    training.add_argument("--out", type=Path, required=True, help="output file of the head, .safetensors")
    training.add_argument("--plot", type=Path, help="output file of the calibration plot, .svg")
    defaults = TrainingSettings()
    for name, what in (
        ("cost_of_wrong_sot", "cost of a wrong SoT when choosing the threshold; a missed one costs 1"),
        ("tversky_weight", "weight of the Tversky loss; the cross-entropy has weight 1"),
        ("wrong_sot", "weight of wrong Skeleton-of-Thoughts in the Tversky loss"),
        ("missed_sot", "weight of missed ones in the Tversky loss"),
        ("decay", "weight decay"),
    ):
        flag = "--" + name.replace("_", "-")
        training.add_argument(
            flag, type=float, default=getattr(defaults, name), help=f"{what} (%(default).2g)"
        )
    training.set_defaults(run=_train)
    evaluation = commands.add_parser("evaluate", help="measure a router on labelled questions")
    evaluation.add_argument("--labels", type=Path, nargs="+", required=True, help=labels)
    evaluation.add_argument("--head", type=Path, default=SHIPPED_HEAD, help="head written by train")
    evaluation.add_argument("--threshold", type=float, help="use this threshold, not the trained one")
    evaluation.add_argument("--plot", type=Path, help="output file of the calibration plot, .svg")
    evaluation.set_defaults(run=_evaluate)
    return parser


def _train(options: argparse.Namespace) -> int:
    questions = read_labels(options.labels)
    settings = TrainingSettings(
        tversky_weight=options.tversky_weight,
        wrong_sot=options.wrong_sot,
        missed_sot=options.missed_sot,
        decay=options.decay,
        cost_of_wrong_sot=options.cost_of_wrong_sot,
    )
    trained = train(questions, _features(questions), settings)
    save_head(trained.head, options.out)
    print(f"Held out in {settings.num_folds} folds:")
    _report(questions, trained.held_out, trained.head.threshold, options.plot, title="held out")
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    questions = read_labels(options.labels)
    router = TrainedRouter(options.head, threshold=options.threshold)
    probabilities, seconds = [], []
    for question in questions:
        begin = time.perf_counter()
        probabilities.append(router.probability(question.question))
        seconds.append(time.perf_counter() - begin)
    milliseconds = 1000 * statistics.median(seconds or [0.0])
    title = ", ".join(path.stem for path in options.labels)
    _report(
        questions, probabilities, router.threshold, options.plot, title=title, ms_per_question=milliseconds
    )
    return 0


def _report(
    questions: Sequence[LabelledQuestion],
    probabilities: Sequence[float],
    threshold: float,
    plot: Path | None,
    *,
    title: str,
    **more: float,
) -> None:
    labels = [question.use_sot for question in questions]
    confusion = Confusion.of(labels, [probability >= threshold for probability in probabilities])
    bins = calibration(labels, probabilities)
    print(f"\n{confusion.table()}\n")
    for one in bins:
        print(f"predicted {one.predicted:.2f}  labelled {one.observed:.2f}  {one.num_questions:5} questions")
    if plot is not None:
        plot.write_text(calibration_svg(bins, title=title), "utf-8")
    figures = {
        "num_questions": confusion.num_questions,
        "accuracy": round(confusion.accuracy, 4),
        "f1": round(confusion.f1, 4),
        "threshold": round(threshold, 4),
        "calibration_error": round(calibration_error(bins), 4),
        **{name: round(value, 3) for name, value in more.items()},
    }
    print("\n" + json.dumps(figures))


def _features(questions: Sequence[LabelledQuestion]) -> list[Features]:
    # Imported here, so that "--help" does not wait for it.
    from rich.console import Console
    from rich.progress import track

    encoder = Encoder()
    shown = track(questions, "Reading the questions", console=Console(stderr=True), transient=True)
    return [Features.of(question.question, encoder) for question in shown]


if __name__ == "__main__":
    sys.exit(main())
