"""Answers to be compared: each question is answered plainly and by Skeleton-of-Thought, timed, and stored.

Answers are generated one at a time, since concurrent ones would slow each other down. The third way, SoT-R,
is not generated: it is whichever of the two its router picks, plus the router's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable

from sot_chains.calls.trace import CallTrace, SotTrace
from sot_chains.chain import SkeletonOfThought
from sot_chains.evaluation.data import Question, Store, key_of
from sot_chains.evaluation.mistakes import mistakes_of
from sot_chains.providers import Provider
from sot_chains.router.route import Route
from sot_chains.router.rules import PLAINLY

Way = Literal["plain", "sot", "sot_r"]
WAYS: tuple[Way, ...] = ("plain", "sot", "sot_r")
NAMES: dict[Way, str] = {"plain": "plain", "sot": "SoT", "sot_r": "SoT-R"}
Watch = Callable[[Iterable[Any], str, int], Iterable[Any]]


def unwatched(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    """Shows no progress."""
    return items


@dataclass(frozen=True)
class AnswerRecord:
    """One answer with its measurements; times in seconds, lengths in words (Chinese: characters).

    Attributes:
        text: The answer; empty if there is none.
        route: The route the answer took, ``"sot"`` or ``"plain"``; ``"none"`` after an error.
        reason: Why it took that route; after an error, the error.
        seconds: Total time, including the router's.
        first_text_seconds: Time to the first text of the answer, ``None`` if there was none.
        skeleton_seconds: Time of the skeleton call.
        points_seconds: From the start of the first point to the end of the last; for a plain answer, the
            time of its call.
        router_seconds: Time of the router.
        point_lengths: Length of each point.
        input_tokens: Input tokens of all calls; ``None`` if the model does not count them.
        output_tokens: Output tokens of all calls, likewise.
        has_failed: Whether there is no answer to compare.
        mistakes: How often each mistake of :mod:`sot_chains.evaluation.mistakes` was made.
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
    mistakes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Answers:
    """The answers to one question, by way, and the router's route; ``None`` without a router."""

    question: Question
    by_way: dict[Way, AnswerRecord]
    route: Route | None

    @property
    def failure(self) -> str:
        """Why there are no answers to compare, each reason once; empty if there are."""
        return "; ".join(dict.fromkeys(record.reason for record in self.by_way.values() if record.has_failed))


async def collect_answers(
    questions: Sequence[Question],
    model: Runnable[LanguageModelInput, Any] | Provider,
    *,
    label: str,
    router: Runnable[LanguageModelInput, Route] | None,
    store: Store,
    before_each: Callable[[], None] = lambda: None,
    watch: Watch = unwatched,
) -> list[Answers]:
    """Answers all ``questions``, reusing the answers in ``store``.

    Args:
        questions: Answered one by one; the two ways take turns in going first.
        model: Any chat model or provider.
        label: Names the model in the store; answers under another label are not reused.
        router: Decides for SoT-R; without one, SoT-R is omitted.
        store: Stores the answers.
        before_each: Called before each answer, to clear the model's cache of the last one.
        watch: Wraps the questions, to show progress; is told what they are for and how many.
    """
    chains = {
        "plain": SkeletonOfThought(model, router=PLAINLY),
        "sot": SkeletonOfThought(model, router="always"),
    }
    collected = []
    for number, question in enumerate(watch(questions, f"{label} answers", len(questions))):
        if question.error:
            failed = AnswerRecord("", "none", question.error, 0.0, has_failed=True)
            ways_asked = WAYS if router is not None else WAYS[:2]
            collected.append(Answers(question, dict.fromkeys(ways_asked, failed), None))
            continue
        records: dict[Way, AnswerRecord] = {}
        ways: tuple[Literal["plain", "sot"], ...] = ("plain", "sot") if number % 2 else ("sot", "plain")
        for way in ways:
            key = key_of(kind="answer", model=label, way=way, question=question.text)
            if (kept := store.get(key)) is None:
                before_each()
                kept = asdict(await _answer(chains[way], question.text))
                if not kept["has_failed"]:  # a resumed run retries failures
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
    except Exception as error:  # a failed answer must not end the run
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
        mistakes=mistakes_of(text, trace),
    )


def length_of(text: str) -> int:
    """Number of words in ``text``; every Chinese character counts as one."""
    num_han = sum("\u3400" <= character <= "\u9fff" for character in text)
    return num_han + len("".join(" " if "\u3400" <= c <= "\u9fff" else c for c in text).split())
