"""The report of an evaluation as Markdown, and its questions as CSV. Neither has a timestamp."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from sot_chains.evaluation.judge import CRITERIA
from sot_chains.evaluation.results import NAMES, Evaluation, JudgeHealth, QuestionResult


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
        f"Questions were answered plainly and by Skeleton-of-Thought (SoT), and {judged}. "
        "SoT-R takes the answer that its router picks. Speed-up: plain seconds over the mode's (median). "
        "Net win rate: wins minus losses against plain, its 95 % bootstrap interval, wins, ties and losses.",
    ]
    if evaluation.judge:
        parts += ["## The judge", _health(evaluation.health)]
    for model, results in evaluation.by_model.items():
        failures = [one.failure for one in results if one.failure]
        parts += [
            f"## {escape(model)}",
            f"{len(results)} questions, {len(failures)} of them failed; `questions.csv` has a line for each.",
        ]
        rows = []
        for category in (None, *evaluation.categories(model)):
            for mode in evaluation.modes:
                figures = dict(vars(evaluation.figures(model, mode, category)))
                judged_by = dict.fromkeys(CRITERIA if evaluation.judge else ()) | figures.pop("net_win_rates")
                rows.append({"category": category or "all", "mode": NAMES[mode], **figures, **judged_by})
        parts.append(_table(rows))
        parts += [f"Failed: {escape(failure)}" for failure in dict.fromkeys(failures)]
    return "\n\n".join(parts) + "\n"


def _health(health: JudgeHealth) -> str:
    return (
        f"{health.num_judgements} judgements: {health.num_unreadable} without a verdict, {health.num_failed} "
        f"failed. Position bias {health.position_bias:+.0%} (first minus second), averaged out."
    )


def _row(result: QuestionResult) -> dict[str, Any]:
    """A line of the CSV; what was not judged has no columns of the judge."""
    row: dict[str, Any] = {
        "question": result.question.name,
        "category": result.question.category,
        "text": result.question.text,
        "route": result.route and ("sot" if result.route.use_sot else "plain"),
        "route_reason": result.route and result.route.reason,
        "failed": result.failure,
    }
    for mode, answer in result.answers.items():
        row |= {f"{mode}_seconds": round(answer.seconds, 4), f"{mode}_words": answer.num_words}
        row |= {f"{mode}_points": answer.num_points, f"{mode}_input_tokens": answer.input_tokens}
    for name, comparison in result.comparisons.items():
        row |= {f"{name}_sot_first": comparison.ours_first, f"{name}_sot_second": comparison.ours_second}
    return row


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """A table whose heads are the keys of the first row."""
    lines = [
        [name.replace("_", " ") for name in rows[0]],
        ["---"] * len(rows[0]),
        *([_cell(value) for value in row.values()] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else escape(" ".join(str(value).split())).replace("|", "&#124;")
