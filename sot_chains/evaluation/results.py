"""The results of an evaluation by model and category. Knows answers and comparisons, not presentation."""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sot_chains.evaluation.answers import Answers, Way, length_of
from sot_chains.evaluation.judge import CRITERIA, FAILURES, Comparison
from sot_chains.evaluation.mistakes import MISTAKES

_NUM_RESAMPLES = 2000
_LOW, _HIGH = 2.5, 97.5


@dataclass(frozen=True)
class NetWinRate:
    """How much more often our answer wins than loses, from -1 to 1, over questions with two verdicts.

    Attributes:
        net: The mean score; 0 without scores.
        low: Lower end of the 95 % bootstrap interval over questions; 0 without scores.
        high: Upper end of that interval.
        num_wins: Questions with a score above 0.
        num_ties: Questions with a score of 0, including those whose two verdicts contradict each other.
        num_losses: Questions with a score below 0.
    """

    net: float
    low: float
    high: float
    num_wins: int
    num_ties: int
    num_losses: int

    @classmethod
    def of(cls, scores: Sequence[float]) -> NetWinRate:
        """The net win rate of ``scores`` with its bootstrap interval."""
        if not scores:
            return cls(0.0, 0.0, 0.0, 0, 0, 0)
        values = np.asarray(scores)
        # Seeded: the same judgements give the same report.
        drawn = np.random.default_rng(0).integers(len(values), size=(_NUM_RESAMPLES, len(values)))
        low, high = np.percentile(values[drawn].mean(axis=1), [_LOW, _HIGH])
        return cls(
            float(values.mean()),
            float(low),
            float(high),
            int((values > 0).sum()),
            int((values == 0).sum()),
            int((values < 0).sum()),
        )


@dataclass(frozen=True)
class JudgeHealth:
    """How reliable a judge is.

    Attributes:
        position_bias: How much more often the first answer is preferred than the second, from -1 to 1, over
            judgements with a verdict.
        agreement: The share of pairs with two verdicts whose verdicts agree.
        num_judgements: Judgements requested.
        num_verdicts: Judgements with a verdict.
        num_failures: Judgements without one, by kind.
    """

    position_bias: float
    agreement: float
    num_judgements: int
    num_verdicts: int
    num_failures: dict[str, int]

    @classmethod
    def of(cls, comparisons: Sequence[Comparison]) -> JudgeHealth:
        """The health over all ``comparisons``."""
        outcomes = Counter(outcome for one in comparisons for outcome in (one.ours_first, one.ours_second))
        num_verdicts = outcomes["first"] + outcomes["second"] + outcomes["tie"]
        valid = [comparison for comparison in comparisons if comparison.is_valid]
        mirrored = {"first": "second", "second": "first", "tie": "tie"}
        num_agreeing = sum(mirrored[one.ours_first] == one.ours_second for one in valid)
        return cls(
            (outcomes["first"] - outcomes["second"]) / num_verdicts if num_verdicts else 0.0,
            num_agreeing / len(valid) if valid else 0.0,
            2 * len(comparisons),
            num_verdicts,
            {kind: outcomes[kind] for kind in FAILURES},
        )


def rounded(values: Any, digits: int = 4) -> Any:
    """``values`` with every nested float rounded; dataclasses become dicts."""
    if hasattr(values, "__dataclass_fields__"):
        values = asdict(values)
    if isinstance(values, float):
        return round(values, digits)
    if isinstance(values, dict):
        return {key: rounded(value, digits) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [rounded(value, digits) for value in values]
    return values


def median(values: Sequence[float]) -> float:
    """The median; 0 without values."""
    return statistics.median(values) if values else 0.0


def mean(values: Sequence[float]) -> float:
    """The mean; 0 without values."""
    return statistics.fmean(values) if values else 0.0


OURS: tuple[Way, ...] = ("sot", "sot_r")
ALL = "all"


@dataclass(frozen=True)
class Judged:
    """One model's answers to one question and, by criterion, how SoT compares with plain.

    ``by_criterion`` is empty if an answer failed or if there is no judge.
    """

    answers: Answers
    by_criterion: dict[str, Comparison] = field(default_factory=dict)

    @property
    def category(self) -> str:
        """The question's category."""
        return self.answers.question.category

    @property
    def is_answered(self) -> bool:
        """Whether every way has an answer."""
        return not any(record.has_failed for record in self.answers.by_way.values())

    def speed_up(self, way: Way) -> float | None:
        """Plain seconds over the seconds of ``way``."""
        records = self.answers.by_way
        if not self.is_answered or way not in records or records[way].seconds <= 0:
            return None
        return records["plain"].seconds / records[way].seconds

    def score(self, way: Way, criterion: str) -> float | None:
        """The score of ``way`` against plain; 0 if SoT-R chose the plain answer."""
        comparison = self.by_criterion.get(criterion)
        if way == "sot_r" and self.answers.route is not None and not self.answers.route.use_sot:
            return 0.0 if self.by_criterion else None
        return comparison.score if comparison else None


@dataclass(frozen=True)
class WayFigures:
    """How one way compares with plain, over some questions.

    Attributes:
        num_questions: Questions that every way has answered.
        num_sot: Of these, those answered by Skeleton-of-Thought.
        speed_up: Median of plain seconds over this way's.
        speed_up_of_sums: Total plain seconds over this way's total.
        net_win_rates: Net win rate by criterion.
        seconds: Median time of an answer.
        skeleton_share: Mean share of the skeleton in the time of answers by Skeleton-of-Thought.
        num_points: Mean number of points of those answers.
        words_per_point: Mean number of words per point.
        words: Mean number of words per answer.
        words_over_plain: Median of the words of answers by Skeleton-of-Thought over those of the plain ones.
        mistakes: How often each mistake was made, see :mod:`sot_chains.evaluation.mistakes`.
        plain_looped: How many of the plain answers to the same questions repeat themselves.
        prefill_overhead: Prompt tokens over those of the plain answers; ``None`` if they are not counted.
    """

    num_questions: int
    num_sot: int
    speed_up: float
    speed_up_of_sums: float
    net_win_rates: dict[str, NetWinRate]
    seconds: float
    skeleton_share: float
    num_points: float
    words_per_point: float
    words: float
    words_over_plain: float
    mistakes: dict[str, int]
    plain_looped: int
    prefill_overhead: float | None

    @classmethod
    def of(cls, judged: Sequence[Judged], way: Way) -> WayFigures:
        """The figures over ``judged``."""
        usable = [one for one in judged if one.is_answered and way in one.answers.by_way]
        plain = [one.answers.by_way["plain"] for one in usable]
        ours = [one.answers.by_way[way] for one in usable]
        by_sot = [record for record in ours if record.route == "sot"]
        counted = [
            (a.input_tokens, b.input_tokens)
            for a, b in zip(ours, plain, strict=True)
            if a.input_tokens is not None and b.input_tokens
        ]
        scores = {
            criterion: [score for one in usable if (score := one.score(way, criterion)) is not None]
            for criterion in CRITERIA
        }
        total = sum(record.seconds for record in ours)
        return cls(
            num_questions=len(usable),
            num_sot=len(by_sot),
            speed_up=median([s for one in usable if (s := one.speed_up(way)) is not None]),
            speed_up_of_sums=sum(record.seconds for record in plain) / total if total else 0.0,
            net_win_rates={name: NetWinRate.of(values) for name, values in scores.items() if values},
            seconds=median([record.seconds for record in ours]),
            skeleton_share=mean([r.skeleton_seconds / r.seconds for r in by_sot if r.seconds > 0]),
            num_points=mean([len(record.point_lengths) for record in by_sot]),
            words_per_point=mean([length for record in by_sot for length in record.point_lengths]),
            words=mean([length_of(record.text) for record in ours]),
            words_over_plain=median(
                [
                    length_of(a.text) / max(1, length_of(b.text))
                    for a, b in zip(ours, plain, strict=True)
                    if a.route == "sot"
                ]
            ),
            mistakes={name: sum(record.mistakes.get(name, 0) for record in ours) for name in MISTAKES},
            plain_looped=sum(record.mistakes.get("looped", 0) for record in plain),
            prefill_overhead=sum(a for a, _ in counted) / sum(b for _, b in counted) if counted else None,
        )


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation.

    Attributes:
        by_model: The judged questions of each model, by its label.
        judge: The judge's label; ``None`` without a judge.
    """

    by_model: dict[str, list[Judged]]
    judge: str | None

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways that are compared with plain."""
        present = {way for judged in self.by_model.values() for one in judged for way in one.answers.by_way}
        return tuple(way for way in OURS if way in present)

    def categories(self, model: str) -> list[str]:
        """The categories, in the order of the questions."""
        judged = [one for one in self.by_model[model] if not one.answers.question.error]
        return list(dict.fromkeys(one.category for one in judged))

    def figures(self, model: str, way: Way, category: str = ALL) -> WayFigures:
        """The figures of one model and way, over one category or all questions."""
        judged = self.by_model[model]
        return WayFigures.of([one for one in judged if category in (ALL, one.category)], way)

    @property
    def health(self) -> JudgeHealth:
        """The health of the judge over all comparisons."""
        return JudgeHealth.of(
            [
                comparison
                for judged in self.by_model.values()
                for one in judged
                for comparison in one.by_criterion.values()
            ]
        )

    def summary(self) -> dict[str, Any]:
        """All results as plain, rounded values."""
        models: dict[str, Any] = {}
        for model, judged in self.by_model.items():
            models[model] = {
                "num_questions": len(judged),
                "num_failed": sum(not one.is_answered for one in judged),
                **{
                    way: {
                        **rounded(self.figures(model, way)),
                        "by_category": {
                            category: rounded(self.figures(model, way, category))
                            for category in self.categories(model)
                        },
                    }
                    for way in self.ways
                },
            }
        return {"models": models, "judge": self.judge, "judge_health": rounded(self.health)}

    def csv(self) -> str:
        """CSV with one line per model and question."""
        text = io.StringIO()
        rows = [self._row(model, one) for model, judged in self.by_model.items() for one in judged]
        columns = dict.fromkeys(column for row in rows for column in row)
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def _row(self, model: str, one: Judged) -> dict[str, Any]:
        """A line of the CSV; what was not judged has no columns of the judge."""
        ways: tuple[Way, ...] = ("plain", *self.ways)
        records, route, sot = one.answers.by_way, one.answers.route, one.answers.by_way["sot"]
        row = {
            "model": model,
            "question": one.answers.question.name,
            "category": one.category,
            "text": one.answers.question.text,
            "route": "" if route is None else ("sot" if route.use_sot else "plain"),
            "route_reason": "" if route is None else route.reason,
            "num_points": len(sot.point_lengths),
            **{f"{way}_seconds": round(records[way].seconds, 4) for way in ways},
            **{f"{way}_words": length_of(records[way].text) for way in ways},
            "skeleton_seconds": round(sot.skeleton_seconds, 4),
            "points_seconds": round(sot.points_seconds, 4),
            "router_seconds": round(records["sot_r"].router_seconds, 4) if "sot_r" in records else "",
            **{f"{way}_input_tokens": records[way].input_tokens for way in ways},
            "failed": one.answers.failure,
        }
        for name, comparison in one.by_criterion.items():
            row[f"{name}_sot_first"] = comparison.ours_first
            row[f"{name}_sot_second"] = comparison.ours_second
        return row
