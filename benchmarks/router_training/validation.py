"""How well routers carry over to other sources: ``python -m benchmarks.router_training.validation``.

Every router is trained on our questions alone; its threshold is the cheapest on held-out folds of them. The
test questions are those of LIMA, whose seven sources follow one another in its file, and Vicuna's: whole
sources that nothing was trained on. Kinds are compared *nested*: for each source, the kind that costs least
on the other sources is taken, so no source has a say in how it is judged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.results import save
from benchmarks.router_training.encoder_training import EncoderSettings, make_features, train_adapter
from benchmarks.router_training.labels import TRAINING, LabelledQuestion, read_labels
from benchmarks.router_training.measures import Confusion
from benchmarks.router_training.training import TrainingSettings, train
from sot_chains.router import RulesRouter
from sot_chains.router.encoder import Encoder, find_minilm
from sot_chains.router.trained import Features, TrainedRouter, is_in_latin_script

# Where each source of LIMA begins in its file (arXiv 2305.11206, table 1).
_LIMA_SOURCES = {
    "Stack Exchange (STEM)": 0,
    "Stack Exchange (other)": 200,
    "the authors": 400,
    "wikiHow": 600,
    "Natural Instructions": 800,
    "Writing Prompts": 850,
    "multi-turn": 1000,
}
_COST_OF_WRONG_SOT = TrainingSettings().cost_of_wrong_sot

Sources = dict[str, list[LabelledQuestion]]
Decide = Callable[[str], bool]


def read_sources(data: Path) -> Sources:
    """The test questions by source; ``data`` holds ``lima.jsonl`` and ``vicuna.jsonl``."""
    lima = read_labels([data / "lima.jsonl"])
    ends = [*list(_LIMA_SOURCES.values())[1:], len(lima)]
    found = {name: lima[begin:end] for (name, begin), end in zip(_LIMA_SOURCES.items(), ends, strict=True)}
    return {**found, "Vicuna": read_labels([data / "vicuna.jsonl"])}


def linear(
    questions: Sequence[LabelledQuestion], encoder: Encoder | None, threshold: float | None = None
) -> Decide:
    """A head on ``encoder``, trained on ``questions``; with its own threshold unless one is given."""
    head = train(questions, make_features(questions, encoder)).head
    lowest = head.threshold if threshold is None else threshold
    return lambda question: head.probability(Features.of(question, encoder)) >= lowest


def kinds(questions: Sequence[LabelledQuestion], num_seeds: int) -> dict[str, Decide]:
    """The compared routers by name."""
    base, rules, shipped = find_minilm(), RulesRouter(), TrainedRouter()
    english = [question for question in questions if is_in_latin_script(question.question)]
    found: dict[str, Decide] = {
        "never": lambda question: False,
        "rules": lambda question: rules.decide(question).use_sot,
        "words, linear": linear(questions, None),
        "shipped": lambda question: shipped.decide(question).use_sot,
    }
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder, "adapter.safetensors")
        untrained = train_adapter(english, base, adapter, EncoderSettings(seeds=()))
        found["MiniLM as published, linear"] = linear(questions, untrained)
        for seed in range(num_seeds):
            encoder = train_adapter(english, base, adapter, EncoderSettings(seeds=(seed,)))
            # Its own threshold would be that of an encoder that has seen the questions.
            found[f"MiniLM trained, seed {seed}"] = linear(questions, encoder, shipped.threshold)
    return found


def confusions(sources: Sources, decide: Decide) -> dict[str, Confusion]:
    """The counts of each source."""
    return {
        name: Confusion.of(
            [question.use_sot for question in questions],
            [decide(question.question) for question in questions],
        )
        for name, questions in sources.items()
    }


def total(counts: Sequence[Confusion]) -> Confusion:
    """The sum of counts."""
    return Confusion(
        sum(each.true_positive for each in counts),
        sum(each.false_positive for each in counts),
        sum(each.false_negative for each in counts),
        sum(each.true_negative for each in counts),
    )


def cost(count: Confusion) -> float:
    """What the wrong decisions cost; a missed Skeleton-of-Thought costs 1."""
    return _COST_OF_WRONG_SOT * count.false_positive + count.false_negative


def nested(by_kind: Mapping[str, Mapping[str, Confusion]]) -> dict[str, str]:
    """For each source, the kind that costs least on the others."""
    sources = list(next(iter(by_kind.values())))

    def elsewhere(kind: str, source: str) -> float:
        return cost(total([count for other, count in by_kind[kind].items() if other != source]))

    return {source: min(by_kind, key=lambda kind: elsewhere(kind, source)) for source in sources}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router_training.validation", description=__doc__
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of lima.jsonl and vicuna.jsonl")
    parser.add_argument("--seeds", type=int, default=2, help="single runs of the encoder's training")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    options = parser.parse_args()
    sources = read_sources(options.data)
    compared = kinds(read_labels(TRAINING), options.seeds)
    by_kind = {name: confusions(sources, decide) for name, decide in compared.items()}
    chosen = nested(by_kind)
    by_kind["nested"] = {source: by_kind[kind][source] for source, kind in chosen.items()}
    summary = {name: _summary(counts) for name, counts in by_kind.items()}
    _print(summary)
    if options.save:
        save("router_validation", {"chosen_for": chosen, "routers": summary}, [])
    print(json.dumps({"chosen_for": chosen, "routers": summary}))


def _summary(counts: Mapping[str, Confusion]) -> dict[str, Any]:
    lima = [count for source, count in counts.items() if source in _LIMA_SOURCES]
    accuracies = [count.accuracy for count in counts.values()]
    return {
        "lima_accuracy": round(total(lima).accuracy, 3),
        "lima_f1": round(total(lima).f1, 3),
        "lima_cost": cost(total(lima)),
        "spread_of_accuracy": [round(min(accuracies), 3), round(max(accuracies), 3)],
        "deviation_of_accuracy": round(statistics.stdev(accuracies), 3),
        "by_source": {
            source: {"accuracy": round(count.accuracy, 3), "f1": round(count.f1, 3)}
            for source, count in counts.items()
        },
    }


def _print(summary: Mapping[str, dict[str, Any]]) -> None:
    table = Table("router", "LIMA", "F1", "cost", *_LIMA_SOURCES, "Vicuna")
    for name, figures in summary.items():
        cells = [f"{each['accuracy']:.2f} / {each['f1']:.2f}" for each in figures["by_source"].values()]
        first = (f"{figures[key]:.3f}" for key in ("lima_accuracy", "lima_f1"))
        table.add_row(name, *first, f"{figures['lima_cost']:.0f}", *cells)
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
