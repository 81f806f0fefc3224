"""Runs an evaluation: every question is answered plainly and by Skeleton-of-Thought, timed, and judged.

Answers are generated one at a time, since concurrent ones would slow each other down. SoT-R is whichever of
the two answers its router picks, plus the router's time. A stopped run resumes from its store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable

from sot_chains.aio.tasks import gather_or_cancel
from sot_chains.calls.trace import SotTrace
from sot_chains.chain import SkeletonOfThought
from sot_chains.evaluation.data import Question, Store
from sot_chains.evaluation.judge import CRITERIA, Judge
from sot_chains.evaluation.results import Evaluation, Mode, QuestionResult, TimedAnswer
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
    before_each: Callable[[], None] = lambda: None,
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
        before_each: Called before each answer, to clear the model's cache of the last one.
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
            for mode, chain in chains:
                answer = partial(_answer, chain, question.text, before_each)
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


async def _answer(chain: SkeletonOfThought, question: str, before_each: Callable[[], None]) -> dict[str, Any]:
    before_each()
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
