"""How well routers decide which questions suit Skeleton-of-Thought, and how long they take.

Every router decides every question of a label file (JSON lines: ``question``, ``use_sot``), alternating: the
shipped router, rules alone, both (the first certain one decides), the shipped router where its encoder is not
installed, and "never". ``--model`` adds a prompted router.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.results import save
from benchmarks.router_training.labels import LabelledQuestion, read_labels
from benchmarks.router_training.measures import Confusion
from sot_chains.router import PromptedRouter, RulesRouter, TrainedRouter, first_certain_of
from sot_chains.router.trained import WORDS_HEAD, Features, Head

Decide = Callable[[str], bool]


def words_alone() -> Decide:
    """What the shipped router does without the encoder."""
    head = Head.load(WORDS_HEAD)
    return lambda question: head.probability(Features.of(question, None)) >= head.threshold


def routers(model: str | None, options: dict[str, Any]) -> dict[str, Decide]:
    """The compared routers, by name."""
    rules, trained = RulesRouter(), TrainedRouter()
    both = first_certain_of(rules, trained)
    found: dict[str, Decide] = {
        "shipped": lambda question: trained.decide(question).use_sot,
        "rules": lambda question: rules.decide(question).use_sot,
        "first_certain": lambda question: both.invoke(question).use_sot,
        "words_alone": words_alone(),
        "never": lambda question: False,
    }
    if model is not None:
        prompted = PromptedRouter(model, **options)
        found["prompted"] = lambda question: prompted.invoke(question).use_sot
    return found


def measure(questions: Sequence[LabelledQuestion], compared: dict[str, Decide]) -> dict[str, dict[str, Any]]:
    """The confusion counts and median milliseconds of each router."""
    decisions: dict[str, list[bool]] = {name: [] for name in compared}
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for decide in compared.values():
        decide("Is everything loaded?")
    for question in track(questions, "Routing", console=Console(stderr=True), transient=True):
        for name, decide in compared.items():
            begin = time.perf_counter()
            decisions[name].append(decide(question.question))
            seconds[name].append(time.perf_counter() - begin)
    labels = [question.use_sot for question in questions]
    return {
        name: {
            "confusion": Confusion.of(labels, decisions[name]),
            "ms_per_question": round(1000 * statistics.median(seconds[name]), 3),
        }
        for name in compared
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__)
    parser.add_argument("--labels", type=Path, required=True, help="JSON lines with question and use_sot")
    parser.add_argument("--model", metavar="VENDOR:NAME", help="model of a prompted router")
    parser.add_argument("--base-url", metavar="URL", help="compatible server for that model")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    options = parser.parse_args()
    questions = read_labels([options.labels])
    given = {"base_url": options.base_url} if options.base_url else {}
    measured = measure(questions, routers(options.model, given))
    table = Table("router", "accuracy", "F1", "SoT right", "SoT wrong", "SoT missed", "plain right", "ms")
    summary: dict[str, Any] = {}
    for name, figures in measured.items():
        confusion: Confusion = figures["confusion"]
        cells = (
            confusion.true_positive,
            confusion.false_positive,
            confusion.false_negative,
            confusion.true_negative,
        )
        table.add_row(
            name,
            f"{confusion.accuracy:.3f}",
            f"{confusion.f1:.3f}",
            *map(str, cells),
            f"{figures['ms_per_question']:.2f}",
        )
        summary[name] = {
            "accuracy": round(confusion.accuracy, 4),
            "f1": round(confusion.f1, 4),
            "ms_per_question": figures["ms_per_question"],
            "confusion": dict(
                zip(
                    ("true_positive", "false_positive", "false_negative", "true_negative"), cells, strict=True
                )
            ),
        }
    Console().print(table)
    if options.save:
        save(f"router_{options.labels.stem}", {"num_questions": len(questions), **summary}, [])
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
