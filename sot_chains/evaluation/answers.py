"""Answers to be compared: each question answered plainly and by Skeleton-of-Thought, timed, and kept.

One question at a time, since answers that are written at once would time each other. The third way, SoT-R,
is not asked for: it is one of the two, whichever its router picks, plus the time the router takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable, RunnableConfig

from sot_chains.calls.trace import CallTrace, SotTrace
from sot_chains.chain import SkeletonOfThought
from sot_chains.evaluation.data import Question, Store, key_of
from sot_chains.providers import Provider
from sot_chains.router.route import Route, Router
from sot_chains.text.conversation import Conversation

Way = Literal["plain", "sot", "sot_r"]
WAYS: tuple[Way, ...] = ("plain", "sot", "sot_r")
NAMES: dict[Way, str] = {"plain": "plain", "sot": "SoT", "sot_r": "SoT-R"}


@dataclass(frozen=True)
class AnswerRecord:
    """One answer and how it came about; times in seconds, lengths in words (Chinese: characters).

    Attributes:
        text: The answer; empty if there is none.
        route: ``"sot"`` or ``"plain"``, as it was written in the end.
        reason: Why that route; for a failed answer, what went wrong.
        seconds: From beginning to end, the router's time included.
        first_text_seconds: Until something could be read, ``None`` if nothing could.
        skeleton_seconds: Of the call for the outline.
        points_seconds: From the first point's beginning to the last one's end; of a plain answer, the
            answer's.
        router_seconds: Of the router.
        point_lengths: Of each point.
        input_tokens: Read by the model, prompts of all calls together; ``None`` if it does not count.
        output_tokens: Written by it.
        has_failed: Whether there is no answer to compare.
    """

    text: str
    route: str
    reason: str
    seconds: float
    first_text_seconds: float | None = None
    skeleton_seconds: float = 0.0
    points_seconds: float = 0.0
    router_seconds: float = 0.0
    point_lengths: tuple[int, ...] = ()
    input_tokens: int | None = None
    output_tokens: int | None = None
    has_failed: bool = False


@dataclass(frozen=True)
class Answers:
    """The answers to one question, by way, and what the router said; ``None`` without a router."""

    question: Question
    by_way: dict[Way, AnswerRecord]
    route: Route | None


class _AlwaysPlainly(Router):
    async def adecide(self, conversation: Conversation, config: RunnableConfig) -> Route:
        return Route(False, "to compare with", 1.0, "evaluation")


async def collect_answers(
    questions: Sequence[Question],
    model: Runnable[LanguageModelInput, Any] | Provider,
    *,
    label: str,
    router: Runnable[LanguageModelInput, Route] | None,
    store: Store,
    before_each: Callable[[], None] = lambda: None,
    watch: Callable[[Iterable[Question]], Iterable[Question]] = iter,
) -> list[Answers]:
    """Answers all ``questions``, or finds their answers in ``store``.

    Args:
        questions: Answered one by one; the two ways go first in turns.
        model: Any chat model or provider.
        label: Names the model in the store: another label is another model.
        router: Decides for SoT-R; without one it is left away.
        store: Where answers are kept.
        before_each: Called before each answer, to drop what the model has kept of the last one.
        watch: Wraps the questions, to show how far they are.
    """
    chains = {"plain": SkeletonOfThought(model, router=_AlwaysPlainly()), "sot": SkeletonOfThought(model)}
    collected = []
    for number, question in enumerate(watch(questions)):
        records: dict[Way, AnswerRecord] = {}
        ways: tuple[Literal["plain", "sot"], ...] = ("plain", "sot") if number % 2 else ("sot", "plain")
        for way in ways:
            key = key_of(kind="answer", model=label, way=way, question=question.text)
            if (kept := store.get(key)) is None:
                before_each()
                kept = asdict(await _answer(chains[way], question.text))
                if not kept["has_failed"]:  # a failure is tried again when the run is taken up
                    store.put(key, kept)
            records[way] = replace(AnswerRecord(**kept), point_lengths=tuple(kept["point_lengths"]))
        route = None
        if router is not None:
            route, seconds = await _route(router, question.text, label, store)
            chosen = records["sot" if route.use_sot else "plain"]
            records["sot_r"] = replace(chosen, seconds=chosen.seconds + seconds, router_seconds=seconds)
        collected.append(Answers(question, {way: records[way] for way in WAYS if way in records}, route))
    return collected


async def _route(
    router: Runnable[LanguageModelInput, Route], question: str, label: str, store: Store
) -> tuple[Route, float]:
    key = key_of(kind="route", model=label, router=repr(router), question=question)
    if (kept := store.get(key)) is None:
        begin = time.perf_counter()
        route = await router.ainvoke(question)
        kept = {"route": asdict(route), "seconds": time.perf_counter() - begin}
        store.put(key, kept)
    return Route(**kept["route"]), kept["seconds"]


async def _answer(chain: SkeletonOfThought, question: str) -> AnswerRecord:
    begin = time.perf_counter()
    try:
        message = await chain.ainvoke(question)
    except Exception as error:  # whatever a model raises is one answer less, not the end of the run
        seconds = time.perf_counter() - begin
        return AnswerRecord("", "none", f"{type(error).__name__}: {error}", seconds, has_failed=True)
    return _record(message.text, message.response_metadata["sot"])


def _record(text: str, trace: SotTrace) -> AnswerRecord:
    skeleton, points, usage = trace["skeleton_call"], trace["points"], trace["usage"]
    plain = trace["plain_call"]
    calls: Sequence[CallTrace] = points or ([plain] if plain else [])
    begin = min((call["start_seconds"] for call in calls), default=0.0)
    end = max((call["end_seconds"] for call in calls), default=0.0)
    return AnswerRecord(
        text=text,
        route=trace["route"],
        reason=trace["route_reason"],
        seconds=trace["seconds"],
        first_text_seconds=trace["first_text_seconds"],
        skeleton_seconds=skeleton["end_seconds"] - skeleton["start_seconds"] if skeleton else 0.0,
        points_seconds=end - begin,
        point_lengths=tuple(length_of(point["text"]) for point in points),
        input_tokens=usage["input_tokens"] if usage else None,
        output_tokens=usage["output_tokens"] if usage else None,
        has_failed=not text.strip(),
    )


def length_of(text: str) -> int:
    """Words of ``text``; every Chinese character is one."""
    num_han = sum("\u3400" <= character <= "\u9fff" for character in text)
    return num_han + len("".join(" " if "\u3400" <= c <= "\u9fff" else c for c in text).split())
