"""The results of an evaluation by model and category. Knows answers and comparisons, not presentation."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from sot_chains.evaluation.data import Question
from sot_chains.evaluation.judge import CRITERIA, Comparison
from sot_chains.outline.words import num_words
from sot_chains.router.route import Route

Mode = Literal["plain", "sot", "sot_r"]
NAMES: dict[Mode, str] = {"plain": "plain", "sot": "SoT", "sot_r": "SoT-R"}

_NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class TimedAnswer:
    """One answer with its measurements."""

    text: str  # empty if there is none
    seconds: float  # in total, the router's included
    num_points: int = 0  # of an answer by Skeleton-of-Thought; 0 for a plain one
    input_tokens: int | None = None  # of all calls; None if the model does not count them
    failure: str = ""  # why there is no answer

    @property
    def num_words(self) -> float:
        """The answer's length; two Chinese characters count as a word."""
        return num_words(self.text)


@dataclass(frozen=True)
class QuestionResult:
    """One model's answers to one question and, by criterion, how SoT's compares with the plain one."""

    question: Question
    answers: dict[Mode, TimedAnswer]
    route: Route | None = None  # of SoT-R; None without a router
    comparisons: dict[str, Comparison] = field(default_factory=dict)  # empty if an answer failed

    @property
    def failure(self) -> str:
        """Why there are no answers to compare, each reason once; empty if there are."""
        return "; ".join(dict.fromkeys(answer.failure for answer in self.answers.values() if answer.failure))

    def score(self, mode: Mode, criterion: str) -> float | None:
        """The score of ``mode`` against plain; 0 if SoT-R chose the plain answer."""
        comparison = self.comparisons.get(criterion)
        if mode == "sot_r" and self.route is not None and not self.route.use_sot:
            return 0.0 if self.comparisons else None
        return comparison.score if comparison else None


@dataclass(frozen=True)
class NetWinRate:
    """How much more often our answer wins than loses, from -1 to 1, over questions with two verdicts."""

    net: float  # the mean score; 0 without scores
    low: float  # of the 95 % bootstrap interval over questions
    high: float
    num_wins: int
    num_ties: int  # including questions whose two verdicts contradict each other
    num_losses: int

    def __str__(self) -> str:
        record = f"{self.num_wins}:{self.num_ties}:{self.num_losses}"
        return f"{self.net:+.0%} [{self.low:+.0%}, {self.high:+.0%}], {record}"

    @classmethod
    def of(cls, scores: Sequence[float]) -> NetWinRate:
        """The net win rate of ``scores`` with its bootstrap interval."""
        values = np.asarray(scores or [0.0])
        # Seeded: the same judgements give the same report.
        drawn = np.random.default_rng(0).integers(len(values), size=(_NUM_RESAMPLES, len(values)))
        low, high = map(float, np.percentile(values[drawn].mean(axis=1), [2.5, 97.5]))
        signs = Counter(np.sign(scores).tolist())
        return cls(float(values.mean()), low, high, signs[1], signs[0], signs[-1])


def judge_health(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """How many judgements there are and how many of no use, and the judge's ``position_bias``.

    That is how much more often it prefers the first answer than the second, from -1 to 1.
    """
    outcomes = Counter(outcome for one in comparisons for outcome in (one.ours_first, one.ours_second))
    counts = {"num_unreadable": outcomes["unreadable"], "num_failed": outcomes["failed"]}
    bias = (outcomes["first"] - outcomes["second"]) / max(1, outcomes.total() - sum(counts.values()))
    return {"position_bias": bias, "num_judgements": outcomes.total(), **counts}


@dataclass(frozen=True)
class Figures:
    """How one mode compares with plain, over the questions that every mode has answered."""

    num_questions: int
    num_sot: int  # of these, those answered by Skeleton-of-Thought
    speed_up: float  # median of plain seconds over this mode's
    seconds: float  # median time of an answer
    num_points: float  # mean, of the answers by Skeleton-of-Thought
    num_words: float  # mean, per answer
    prefill_overhead: float | None  # prompt tokens over those of the plain answers, if they are counted
    net_win_rates: dict[str, NetWinRate]  # by criterion


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation."""

    by_model: dict[str, list[QuestionResult]]  # by the model's label
    judge: str | None  # the judge's label

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that are compared with plain."""
        present = {mode for results in self.by_model.values() for one in results for mode in one.answers}
        return tuple(mode for mode in NAMES if mode in present and mode != "plain")

    def categories(self, model: str) -> list[str]:
        """The categories, in the order of the questions."""
        return list(dict.fromkeys(one.question.category for one in self.by_model[model]))

    def figures(self, model: str, mode: Mode, category: str | None = None) -> Figures:
        """The figures of one model and mode, over one category or all questions, without failed ones."""
        in_category = [one for one in self.by_model[model] if category in (None, one.question.category)]
        usable = [one for one in in_category if not one.failure and mode in one.answers]
        pairs = [(one.answers["plain"], one.answers[mode]) for one in usable]
        ours = [answer for _, answer in pairs]
        num_points = [answer.num_points for answer in ours if answer.num_points]
        counted = [(a.input_tokens, b.input_tokens) for a, b in pairs if a.input_tokens and b.input_tokens]
        scores = {name: [one.score(mode, name) for one in usable] for name in CRITERIA}
        judged = {name: [score for score in given if score is not None] for name, given in scores.items()}
        return Figures(
            num_questions=len(usable),
            num_sot=len(num_points),
            speed_up=median([plain.seconds / mine.seconds for plain, mine in pairs if mine.seconds] or [0.0]),
            seconds=median([answer.seconds for answer in ours] or [0.0]),
            num_points=fmean(num_points or [0.0]),
            num_words=fmean([answer.num_words for answer in ours] or [0.0]),
            prefill_overhead=sum(b for _, b in counted) / sum(a for a, _ in counted) if counted else None,
            net_win_rates={name: NetWinRate.of(values) for name, values in judged.items() if values},
        )

    @property
    def health(self) -> dict[str, float]:
        """How reliable the judge is over all comparisons; see :func:`judge_health`."""
        compared = [one for results in self.by_model.values() for one in results]
        return judge_health([comparison for one in compared for comparison in one.comparisons.values()])

    def summary(self) -> dict[str, Any]:
        """All results as JSON values, rounded."""
        models: dict[str, Any] = {}
        for model, results in self.by_model.items():
            num_failed = sum(bool(one.failure) for one in results)
            models[model] = {"num_questions": len(results), "num_failed": num_failed}
            for mode in self.modes:
                by_category = {name: self.figures(model, mode, name) for name in self.categories(model)}
                models[model][mode] = {**vars(self.figures(model, mode)), "by_category": by_category}
        summary = {"models": models, "judge": self.judge, "judge_health": self.health}
        rounded: dict[str, Any] = json.loads(
            json.dumps(summary, default=vars), parse_float=lambda number: round(float(number), 4)
        )
        return rounded


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
        parts += ["## The judge", _table([evaluation.health])]
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


def _row(result: QuestionResult) -> dict[str, Any]:
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
