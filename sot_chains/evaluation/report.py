"""The report of an evaluation as Markdown, and its questions as CSV. Neither has a timestamp."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from sot_chains.evaluation.judge import ASPECTS, GENERAL
from sot_chains.evaluation.results import NAMES, Evaluation, Figures, NetWinRate, QuestionResult


def write(evaluation: Evaluation, folder: Path) -> Path:
    """Writes ``report.md``, ``questions.csv`` and ``summary.json`` (one line); returns the first's path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"model": model, **_row(one)} for model, results in evaluation.by_model.items() for one in results
    ]
    with (folder / "questions.csv").open("w", encoding="utf-8", newline="") as file:
        columns = dict.fromkeys(column for row in rows for column in row)
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (folder / "summary.json").write_text(json.dumps(evaluation.summary()) + "\n", "utf-8")
    report = folder / "report.md"
    report.write_text(markdown(evaluation), "utf-8")
    return report


def markdown(evaluation: Evaluation) -> str:
    """The report; what users and models wrote is escaped in it."""
    judged = f"judged by {escape(evaluation.judge)} in both orders" if evaluation.judge else "not judged"
    parts = [
        "# Skeleton-of-Thought: speed and quality",
        "Every question was answered plainly and by Skeleton-of-Thought (SoT), one after another; the "
        f"answers were {judged}. SoT-R takes whichever of the two answers its router picks. Speed-up: plain "
        "seconds over the mode's, median over questions. Net win rate: how much more often the mode is "
        "preferred to plain than plain to it, with its 95 % bootstrap interval over questions.",
    ]
    if evaluation.judge:
        parts += ["## The judge", _health(evaluation)]
    for model, results in evaluation.by_model.items():
        num_failed = sum(bool(one.failure) for one in results)
        parts += [
            f"## {escape(model)}",
            f"{len(results)} questions, {num_failed} of them failed; `questions.csv` has a line for each.",
        ]
        rows = [
            {"category": category or "all", "mode": NAMES[mode]}
            | _cells(evaluation.figures(model, mode, category))
            for category in (None, *evaluation.categories(model))
            for mode in evaluation.modes
        ]
        parts.append(_table(rows))
        if evaluation.judge:
            rates = {NAMES[mode]: evaluation.figures(model, mode).net_win_rates for mode in evaluation.modes}
            rows = [
                {
                    "aspect": aspect,
                    **{name: _rate(by_aspect.get(aspect)) for name, by_aspect in rates.items()},
                }
                for aspect in ASPECTS
            ]
            parts += ["### Net win rate by aspect", _table(rows)]
        failures = dict.fromkeys(one.failure for one in results if one.failure)
        parts += [f"Failed: {escape(failure)}" for failure in failures]
    return "\n\n".join(parts) + "\n"


def _health(evaluation: Evaluation) -> str:
    health = evaluation.health
    failures = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in health.num_failures.items())
    return (
        f"{health.num_judgements} judgements, {health.num_verdicts} verdicts; without one: {failures}. "
        "A question counts only with verdicts in both orders. "
        f"Position bias {100 * health.position_bias:+.0f} % (first minus second, among verdicts), averaged "
        f"out by judging both orders; the orders agree on {100 * health.agreement:.0f} % of pairs."
    )


def _cells(figures: Figures) -> dict[str, Any]:
    rate = figures.net_win_rates.get(GENERAL)
    return {
        "by SoT": f"{figures.num_sot} of {figures.num_questions}",
        "speed-up": figures.speed_up,
        "of sums": figures.speed_up_of_sums,
        "net win rate": _rate(rate),
        "wins, ties, losses": f"{rate.num_wins}, {rate.num_ties}, {rate.num_losses}" if rate else "",
        "median s": figures.seconds,
        "skeleton's share": figures.skeleton_share,
        "points": figures.num_points,
        "words a point": figures.words_per_point,
        "words": figures.words,
        "prompt tokens over plain": figures.prefill_overhead,
    }


def _rate(rate: NetWinRate | None) -> str:
    return f"{100 * rate.net:+.0f} % [{100 * rate.low:+.0f}, {100 * rate.high:+.0f}]" if rate else ""


def _row(result: QuestionResult) -> dict[str, Any]:
    """A line of the CSV; what was not judged has no columns of the judge."""
    route = result.route
    row: dict[str, Any] = {
        "question": result.question.name,
        "category": result.question.category,
        "text": result.question.text,
        "route": "" if route is None else ("sot" if route.use_sot else "plain"),
        "route_reason": "" if route is None else route.reason,
        "num_points": len(result.answers["sot"].point_lengths),
        "skeleton_seconds": round(result.answers["sot"].skeleton_seconds, 4),
        "failed": result.failure,
    }
    for mode, answer in result.answers.items():
        row[f"{mode}_seconds"] = round(answer.seconds, 4)
        row[f"{mode}_words"] = answer.length
        row[f"{mode}_input_tokens"] = answer.input_tokens
    for name, comparison in result.comparisons.items():
        row[f"{name}_sot_first"] = comparison.ours_first
        row[f"{name}_sot_second"] = comparison.ours_second
    return row


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """A table whose heads are the keys of the first row."""
    lines = [
        list(rows[0]),
        ["---"] * len(rows[0]),
        *([_cell(value) for value in row.values()] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else escape(" ".join(str(value).split())).replace("|", "&#124;")
