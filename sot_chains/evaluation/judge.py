"""A chat model as the judge of two answers: its request, and how its reply is read.

Every pair is judged in both orders, since judges have a position bias (arXiv 2305.17926). Replies without a
readable verdict, refusals, failed calls and timeouts are counted separately, never as ties. The general
question follows FastChat's evaluation and the aspects follow LLMZoo, both in our own words.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import HumanMessage
from langchain_core.runnables import Runnable, RunnableConfig

from sot_chains.evaluation.data import Store, make_key
from sot_chains.providers import Provider, make_provider
from sot_chains.providers.base import find_ending

Verdict = Literal["first", "second", "tie"]
Failure = Literal["unreadable", "refused", "timed_out", "failed"]
Outcome = Verdict | Failure
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
FAILURES: tuple[Failure, ...] = get_args(Failure)

GENERAL = "general"
_CRITERIA = {
    GENERAL: "Judge which of them serves the one who asked better. Consider whether it helps, is to the "
    "point, right, detailed enough and easy to follow.",
    "coherence": "Coherence: does the answer hang together, each part following from the question and "
    "fitting the others?",
    "diversity": "Diversity: does the answer look at the matter from several sides, with different ideas and "
    "examples rather than one in many words?",
    "immersion": "Immersion: does the answer take on the situation, tone or role the question sets, as "
    "somebody would who is in it?",
    "integrity": "Integrity: is the answer whole and right, without gaps, invented facts or contradictions?",
    "relevance": "Relevance: does the answer keep to what was asked, without things nobody asked for?",
}
CRITERIA = tuple(_CRITERIA)
ASPECTS = CRITERIA[1:]

_REQUEST = """Two assistants were asked the same thing. Compare what they wrote.

<question>
{question}
</question>

<answer_1>
{first}
</answer_1>

<answer_2>
{second}
</answer_2>

{criterion}

Which answer stands first here is chance, and a longer answer is not better for being long. \
Give your reasons in two or three sentences. Then end with one line that says exactly one of
VERDICT: 1
VERDICT: 2
VERDICT: TIE"""
_VERDICT = re.compile(r"VERDICT\W{0,6}(?:answer[ _]?)?(1|2|TIE)\b", re.IGNORECASE)
_READINGS: dict[str, Verdict] = {"1": "first", "2": "second", "TIE": "tie"}
_REFUSAL = re.compile(
    r"\b(?:I(?:'m| am) (?:sorry|unable|not able)|I (?:can(?:no|')t|won't|must decline)|as an AI)\b"
    r"|抱歉|无法(?:评判|判断|回答)",
    re.IGNORECASE,
)
_MAX_CHARACTERS = 20_000


def read_verdict(reply: str, finish_reason: str | None = None) -> Outcome:
    """Reads a judge's reply; the last verdict counts, since the reasons may mention others."""
    if found := _VERDICT.findall(reply):
        return _READINGS[found[-1].upper()]
    return "refused" if find_ending(finish_reason) == "filtered" or _REFUSAL.search(reply) else "unreadable"


def make_request(criterion: str, question: str, first: str, second: str) -> str:
    """The request to the judge.

    Raises:
        ValueError: There is no such criterion.
    """
    if criterion not in CRITERIA:
        raise ValueError(f"criterion must be one of {CRITERIA}, got {criterion!r}")
    asked = _CRITERIA[criterion]
    if criterion != GENERAL:
        asked = f"Judge one aspect only and leave everything else aside.\n{asked}"
    # In one pass, so that fields and braces inside answers stay text.
    fields = {"question": question, "first": first, "second": second, "criterion": asked}
    return re.sub(r"\{(question|first|second|criterion)\}", lambda match: fields[match[1]], _REQUEST)


@dataclass(frozen=True)
class Comparison:
    """The judgements of our answer against another, in both orders."""

    ours_first: Outcome  # with our answer in first position
    ours_second: Outcome

    @property
    def score(self) -> float | None:
        """From 1 (ours won in both orders) to -1; ``None`` without two verdicts, since one is biased."""
        points = {"first": 1, "second": -1, "tie": 0}
        if self.ours_first not in points or self.ours_second not in points:
            return None
        return (points[self.ours_first] - points[self.ours_second]) / 2


class Judge:
    """Compares answers with a chat model.

    Args:
        model: Any chat model, ``"openai:NAME"`` or ``"anthropic:NAME"``.
        store: Stores its replies.
        label: Names the judge in the store and the report; replies under another label are not reused.
        timeout_seconds: Timeout of one reply.
        max_concurrency: Concurrent calls.
        **options: Options of a model given by name.
    """

    def __init__(
        self,
        model: str | Runnable[LanguageModelInput, Any] | Provider,
        *,
        store: Store,
        label: str | None = None,
        timeout_seconds: float = 120.0,
        max_concurrency: int = 8,
        **options: Any,
    ) -> None:
        for name, value in (("timeout_seconds", timeout_seconds), ("max_concurrency", max_concurrency)):
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self._provider = make_provider(model, **options)
        self._store = store
        self.label = label or self._provider.model_name
        self._timeout_seconds = timeout_seconds
        self._free = asyncio.Semaphore(max_concurrency)

    async def compare(self, criterion: str, question: str, ours: str, other: str) -> Comparison:
        """Judges the pair in both orders."""
        ours_first, ours_second = await asyncio.gather(
            self._judge(make_request(criterion, question, ours, other)),
            self._judge(make_request(criterion, question, other, ours)),
        )
        return Comparison(ours_first, ours_second)

    async def _judge(self, request: str) -> Outcome:
        key = make_key(kind="judgement", judge=self.label, request=request)
        kept = self._store.get(key)
        if kept is None:
            try:
                async with self._free, asyncio.timeout(self._timeout_seconds):
                    kept = await self._ask(request)
            except TimeoutError:
                return "timed_out"
            except Exception:  # a failed judgement must not end the run
                return "failed"
            self._store.put(key, kept)  # failures are not stored, so a resumed run retries them
        return read_verdict(kept["reply"], kept["finish_reason"])

    async def _ask(self, request: str) -> dict[str, Any]:
        reply, finish_reason = "", None
        deltas = self._provider.stream([HumanMessage(request)], config=RunnableConfig(run_name="judge"))
        async with aclosing(cast("Any", deltas)):
            async for delta in deltas:
                reply += delta.text
                finish_reason = delta.finish_reason or finish_reason
                if len(reply) > _MAX_CHARACTERS:
                    break
        return {"reply": reply, "finish_reason": finish_reason}
