"""A chat model as the judge of two answers: its request, and how its reply is read.

Every pair is judged in both orders, since judges have a position bias (arXiv 2305.17926). Replies without a
readable verdict and failed calls are never ties. The questions follow FastChat and LLMZoo, in our own words.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable

from sot_chains.chain import SkeletonOfThought
from sot_chains.evaluation.data import Store
from sot_chains.prompts.profile import UNFILTERED
from sot_chains.prompts.templates import load_wording
from sot_chains.providers import Provider

Outcome = Literal["first", "second", "tie", "unreadable", "failed"]

GENERAL = "general"
_WORDING = load_wording("en")["judge"]
CRITERIA = tuple(_WORDING["criteria"])
ASPECTS = CRITERIA[1:]

_VERDICT = re.compile(r"VERDICT\W{0,6}(?:answer[ _]?)?(1|2|TIE)\b", re.IGNORECASE)
_POINTS = {"first": 1, "second": -1, "tie": 0}
_READINGS: dict[str, Outcome] = {"1": "first", "2": "second", "TIE": "tie"}


def read_verdict(reply: str) -> Outcome:
    """Reads a judge's reply; the last verdict counts, since the reasons may mention others."""
    found = _VERDICT.findall(reply)
    return _READINGS[found[-1].upper()] if found else "unreadable"


def make_request(criterion: str, question: str, first: str, second: str) -> str:
    """The request to the judge."""
    if criterion not in CRITERIA:
        raise ValueError(f"criterion must be one of {CRITERIA}, got {criterion!r}")
    asked = ("" if criterion == GENERAL else _WORDING["aspect"]) + _WORDING["criteria"][criterion]
    request: str = _WORDING["request"]
    return request.format(question=question, first=first, second=second, criterion=asked)


@dataclass(frozen=True)
class Comparison:
    """The judgements of our answer against another, in both orders."""

    ours_first: Outcome  # with our answer in first position
    ours_second: Outcome

    @property
    def score(self) -> float | None:
        """From 1 (ours won in both orders) to -1; ``None`` without two verdicts, since one is biased."""
        first, second = _POINTS.get(self.ours_first), _POINTS.get(self.ours_second)
        return None if first is None or second is None else (first - second) / 2


class Judge:
    """Compares answers with a chat model.

    Its replies are kept in ``store`` under ``label``; ``options`` are further ones of ``SkeletonOfThought``.
    """

    def __init__(
        self,
        model: str | Runnable[LanguageModelInput, Any] | Provider,
        *,
        store: Store,
        label: str | None = None,
        timeout_seconds: float = 120.0,
        **options: Any,
    ) -> None:
        if timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}")
        self._chain = SkeletonOfThought(model, router="never", profile=UNFILTERED, **options)
        self._store = store
        self.label = label or self._chain.provider.model_name
        self._timeout_seconds = timeout_seconds

    async def compare(self, criterion: str, question: str, ours: str, other: str) -> Comparison:
        """Judges the pair in both orders."""
        ours_first, ours_second = await asyncio.gather(
            self._judge(make_request(criterion, question, ours, other)),
            self._judge(make_request(criterion, question, other, ours)),
        )
        return Comparison(ours_first, ours_second)

    async def _judge(self, request: str) -> Outcome:
        async def ask() -> str:
            async with asyncio.timeout(self._timeout_seconds):
                return (await self._chain.ainvoke(request)).text

        try:
            reply = await self._store.get_or_make(ask, kind="reply", judge=self.label, request=request)
        except Exception:  # a failed judgement must not end the run; a resumed one retries it
            return "failed"
        return read_verdict(reply)
