"""Runs a whole evaluation: answers, judgements, results. Resumes where it was stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable

from sot_chains.aio.tasks import gather_or_cancel
from sot_chains.evaluation.answers import Answers, Watch, collect_answers, unwatched
from sot_chains.evaluation.data import Question, Store
from sot_chains.evaluation.judge import CRITERIA, Judge
from sot_chains.evaluation.report import html
from sot_chains.evaluation.results import Evaluation, Judged
from sot_chains.providers import Provider
from sot_chains.router.route import Route


async def evaluate(
    questions: Sequence[Question],
    models: Mapping[str, Runnable[LanguageModelInput, Any] | Provider],
    *,
    store: Store,
    router: Runnable[LanguageModelInput, Route] | None = None,
    judge: Judge | None = None,
    criteria: Sequence[str] = CRITERIA,
    judge_name: str = "judge",
    before_each: Callable[[], None] = lambda: None,
    watch: Watch = unwatched,
) -> Evaluation:
    """Collects the answers and has them judged.

    Args:
        questions: The questions for every model.
        models: Models by label.
        store: Stores answers, routes and judgements; a run with the same store resumes.
        router: Decides for SoT-R.
        judge: Compares SoT with plain; without one only speed is measured.
        criteria: The criteria it judges by.
        judge_name: The judge's name in the report.
        before_each: Called before each answer.
        watch: Wraps the items of a loop, to show progress.
    """
    by_model = {}
    for label, model in models.items():
        answers = await collect_answers(
            questions,
            model,
            label=label,
            router=router,
            store=store,
            before_each=before_each,
            watch=watch,
        )
        by_model[label] = await _judged(answers, judge, criteria, watch)
    return Evaluation(by_model, judge_name if judge else None)


async def _judged(
    answers: Sequence[Answers], judge: Judge | None, criteria: Sequence[str], watch: Watch
) -> list[Judged]:
    async def judged(one: Answers) -> Judged:
        plain, sot = one.by_way["plain"], one.by_way["sot"]
        # An answer that has failed can't be compared; one that fell back to the plain route can.
        if judge is None or plain.has_failed or sot.has_failed:
            return Judged(one)
        comparisons = await asyncio.gather(
            *(judge.compare(criterion, one.question.text, sot.text, plain.text) for criterion in criteria)
        )
        return Judged(one, dict(zip(criteria, comparisons, strict=True)))

    done: list[Judged] = []
    # A few questions at a time; the judge bounds the calls.
    groups = [answers[start : start + 8] for start in range(0, len(answers), 8)]
    for group in watch(groups, "Judging", len(groups)):
        done += await gather_or_cancel(judged(one) for one in group)
    return done


def write(evaluation: Evaluation, folder: Path) -> Path:
    """Writes ``report.html``, ``questions.csv`` and ``summary.json`` (one line); returns the first's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "questions.csv").write_text(evaluation.csv(), "utf-8")
    (folder / "summary.json").write_text(json.dumps(evaluation.summary()) + "\n", "utf-8")
    report = folder / "report.html"
    report.write_text(html(evaluation), "utf-8")
    return report
