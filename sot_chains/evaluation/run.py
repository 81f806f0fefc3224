"""Runs an evaluation: every question is answered plainly and by Skeleton-of-Thought, timed, and judged.

Answers are generated one at a time, since concurrent ones would slow each other down. SoT-R is whichever of
the two answers its router picks, plus the router's time. A stopped run resumes from its store.
"""

from __future__ import annotations

import csv
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable

from sot_chains.aio.blocking import gather_or_cancel
from sot_chains.calls.trace import SotTrace
from sot_chains.chain import SkeletonOfThought
from sot_chains.evaluation.judge import CRITERIA, Comparison, Judge, Question, Store
from sot_chains.outline.words import num_words
from sot_chains.providers import Provider
from sot_chains.rendering import render
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
            num_words=fmean([num_words(answer.text) for answer in ours] or [0.0]),
            prefill_overhead=sum(b for _, b in counted) / sum(a for a, _ in counted) if counted else None,
            net_win_rates={name: NetWinRate.of(values) for name, values in judged.items() if values},
        )

    @property
    def health(self) -> dict[str, float]:
        """How many judgements there are and how many of no use, and the judge's ``position_bias``.

        That is how much more often it prefers the first answer than the second, from -1 to 1.
        """
        results = chain.from_iterable(self.by_model.values())
        compared = chain.from_iterable(one.comparisons.values() for one in results)
        outcomes = Counter(outcome for two in compared for outcome in (two.ours_first, two.ours_second))
        counts = {"num_unreadable": outcomes["unreadable"], "num_failed": outcomes["failed"]}
        bias = (outcomes["first"] - outcomes["second"]) / max(1, outcomes.total() - sum(counts.values()))
        return {"position_bias": bias, "num_judgements": outcomes.total(), **counts}

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
        written = json.dumps(summary, default=vars)
        rounded: dict[str, Any] = json.loads(written, parse_float=lambda number: round(float(number), 4))
        return rounded


def write(evaluation: Evaluation, folder: Path) -> Path:
    """Writes ``report.md``, ``questions.csv`` and ``summary.json`` (one line); returns the first's path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_row(model, one) for model, results in evaluation.by_model.items() for one in results]
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
    return render("report.md", evaluation=evaluation, names=NAMES, criteria=CRITERIA) + "\n"


def _row(model: str, result: QuestionResult) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": model,
        "question": result.question.name,
        "category": result.question.category,
        "text": result.question.text,
        "route": result.route and ("sot" if result.route.use_sot else "plain"),
        "route_reason": result.route and result.route.reason,
        "failed": result.failure,
    }
    for mode, answer in result.answers.items():
        row |= {f"{mode}_seconds": round(answer.seconds, 4), f"{mode}_words": num_words(answer.text)}
        row |= {f"{mode}_points": answer.num_points, f"{mode}_input_tokens": answer.input_tokens}
    for name, comparison in result.comparisons.items():
        row |= {f"{name}_sot_first": comparison.ours_first, f"{name}_sot_second": comparison.ours_second}
    return row


async def evaluate(
    questions: Sequence[Question],
    models: Mapping[str, Runnable[LanguageModelInput, Any] | Provider],
    *,
    store: Store,
    router: Runnable[LanguageModelInput, Route] | None = None,
    judge: Judge | None = None,
    criteria: Sequence[str] = CRITERIA,
    watch: Callable[[Sequence[Question], str], Iterable[Question]] = lambda questions, label: questions,
) -> Evaluation:
    """Collects the answers and has them judged.

    Args:
        questions: The questions for every model, answered one by one.
        models: Models by label; answers stored under another label are not reused.
        store: Stores answers, routes and judgements; a run with the same store resumes.
        router: Decides for SoT-R; without one, SoT-R is omitted.
        judge: Compares SoT with plain; without one only speed is measured.
        criteria: The criteria it judges by.
        watch: Wraps the questions to each model, given its label, to show progress.
    """
    by_model: dict[str, list[QuestionResult]] = {}
    for label, model in models.items():
        chains: list[tuple[Mode, SkeletonOfThought]] = [
            ("sot", SkeletonOfThought(model, router="always")),
            ("plain", SkeletonOfThought(model, router="never")),
        ]
        by_model[label] = []
        for question in watch(questions, label):
            answers: dict[Mode, TimedAnswer] = {}
            for mode, model_in_mode in chains:
                answer = partial(_answer, model_in_mode, question.text)
                asked = {"kind": "timed answer", "model": label, "mode": mode, "question": question.text}
                try:
                    answers[mode] = TimedAnswer(**await store.get_or_make(answer, **asked))
                except Exception as error:  # a failed answer must not end the run; a resumed one retries it
                    answers[mode] = TimedAnswer("", 0.0, failure=f"{type(error).__name__}: {error}")
            chains.reverse()  # they take turns in going first
            result = QuestionResult(question, answers)
            if router is not None:
                result = await _with_route(result, router, label, store)
            if judge is not None and not result.failure:
                texts = question.text, answers["sot"].text, answers["plain"].text
                compared = await gather_or_cancel(judge.compare(criterion, *texts) for criterion in criteria)
                result = replace(result, comparisons=dict(zip(criteria, compared, strict=True)))
            by_model[label].append(result)
    return Evaluation(by_model, judge.label if judge else None)


async def _answer(chain: SkeletonOfThought, question: str) -> dict[str, Any]:
    message = await chain.ainvoke(question)
    trace: SotTrace = message.response_metadata["sot"]
    if not message.text.strip():
        raise ValueError(f"an empty answer: {trace['route_reason']}")
    num_points = len(trace["points"]) if trace["route"] != "plain" else 0
    input_tokens = trace["usage"]["input_tokens"] if trace["usage"] else None
    return asdict(TimedAnswer(message.text, trace["seconds"], num_points, input_tokens))


async def _with_route(
    result: QuestionResult, router: Runnable[LanguageModelInput, Route], label: str, store: Store
) -> QuestionResult:
    question = result.question.text

    async def decide() -> tuple[dict[str, Any], float]:
        begin = time.perf_counter()
        route = await router.ainvoke(question)
        return asdict(route), time.perf_counter() - begin

    asked = {"model": label, "router": repr(router), "question": question}
    fields, seconds = await store.get_or_make(decide, kind="timed route", **asked)
    route = Route(**fields)
    chosen = result.answers["sot" if route.use_sot else "plain"]
    sot_r = replace(chosen, seconds=chosen.seconds + seconds)
    return replace(result, answers={**result.answers, "sot_r": sot_r}, route=route)
