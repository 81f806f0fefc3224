"""Runs an evaluation: every question is answered plainly and by Skeleton-of-Thought, timed, and judged.

Answers are generated one at a time, since concurrent ones would slow each other down. SoT-R is not generated:
it is whichever of the two answers its router picks, plus the router's time. A stopped run resumes from its
store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable

from sot_chains.aio.tasks import gather_or_cancel
from sot_chains.calls.trace import SotTrace
from sot_chains.chain import SkeletonOfThought
from sot_chains.evaluation.data import Question, Store, make_key
from sot_chains.evaluation.judge import CRITERIA, Judge
from sot_chains.evaluation.results import Evaluation, Mode, QuestionResult, TimedAnswer, count_words
from sot_chains.providers import Provider
from sot_chains.router.route import Route
from sot_chains.router.rules import PLAINLY

_ORDERS: tuple[tuple[Literal["plain", "sot"], ...], ...] = (("sot", "plain"), ("plain", "sot"))


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
        chains = {
            "plain": SkeletonOfThought(model, router=PLAINLY),
            "sot": SkeletonOfThought(model, router="always"),
        }
        by_model[label] = []
        for number, question in enumerate(watch(questions, label)):
            answers: dict[Mode, TimedAnswer] = {}
            for mode in _ORDERS[number % 2]:  # they take turns in going first
                key = make_key(kind="answer", model=label, mode=mode, question=question.text)
                if (kept := store.get(key)) is None:
                    before_each()
                    kept = asdict(await _answer(chains[mode], question.text))
                    if not kept["failure"]:  # a resumed run retries failures
                        store.put(key, kept)
                answers[mode] = TimedAnswer(**kept)
            result = QuestionResult(question, answers)
            if router is not None:
                result = await _with_route(result, router, label, store)
            if judge is not None and not result.failure:
                result = await _judged(result, judge, criteria)
            by_model[label].append(result)
    return Evaluation(by_model, judge.label if judge else None)


async def _answer(chain: SkeletonOfThought, question: str) -> TimedAnswer:
    begin = time.perf_counter()
    try:
        message = await chain.ainvoke(question)
    except Exception as error:  # a failed answer must not end the run
        seconds = time.perf_counter() - begin
        return TimedAnswer("", "plain", seconds, failure=f"{type(error).__name__}: {error}")
    trace: SotTrace = message.response_metadata["sot"]
    skeleton, usage = trace["skeleton_call"], trace["usage"]
    return TimedAnswer(
        text=message.text,
        route=trace["route"],
        seconds=trace["seconds"],
        skeleton_seconds=skeleton["end_seconds"] - skeleton["start_seconds"] if skeleton else 0.0,
        point_lengths=[count_words(point["text"]) for point in trace["points"]],
        input_tokens=usage["input_tokens"] if usage else None,
        failure="" if message.text.strip() else f"an empty answer: {trace['route_reason']}",
    )


async def _with_route(
    result: QuestionResult, router: Runnable[LanguageModelInput, Route], label: str, store: Store
) -> QuestionResult:
    """``result`` with SoT-R, whose time includes the router's."""
    key = make_key(kind="route", model=label, router=repr(router), question=result.question.text)
    if (kept := store.get(key)) is None:
        begin = time.perf_counter()
        route = await router.ainvoke(result.question.text)
        kept = {"route": asdict(route), "seconds": time.perf_counter() - begin}
        store.put(key, kept)
    route, seconds = Route(**kept["route"]), kept["seconds"]
    chosen = result.answers["sot" if route.use_sot else "plain"]
    sot_r = replace(chosen, seconds=chosen.seconds + seconds)
    return replace(result, answers={**result.answers, "sot_r": sot_r}, route=route)


async def _judged(result: QuestionResult, judge: Judge, criteria: Sequence[str]) -> QuestionResult:
    sot, plain = result.answers["sot"].text, result.answers["plain"].text
    compared = await gather_or_cancel(
        judge.compare(criterion, result.question.text, sot, plain) for criterion in criteria
    )
    return replace(result, comparisons=dict(zip(criteria, compared, strict=True)))
