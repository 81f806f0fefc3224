"""Questions, the store that keeps results between runs, and a chat model as the judge of two answers.

Every pair is judged in both orders, since judges have a position bias (arXiv 2305.17926). Replies without a
readable verdict and failed calls are never ties. The questions follow FastChat and LLMZoo, in our own words.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable

from sot_chains.chain import SkeletonOfThought
from sot_chains.prompts.conversation import without_surrogates
from sot_chains.prompts.profile import UNFILTERED, load_data
from sot_chains.providers import Provider


@dataclass(frozen=True, slots=True)
class Question:
    """One question."""

    text: str  # as a user would send it
    category: str  # results are grouped by it
    name: str  # identifies the question in tables


def read_questions(path: Path | str) -> list[Question]:
    """Reads a JSON Lines file of questions; the category is ``"all"`` where it is missing."""
    questions = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        try:
            if not (content := line.decode("utf-8-sig").strip()):
                continue
            fields = without_surrogates(json.loads(content))
            text = fields["question"]
            if not text.strip():
                raise ValueError("the question has no text")
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            expected = 'expected {"question": "...", "category": "..."} in UTF-8'
            raise ValueError(f"{path}, line {number}: {expected}: {error}") from error
        questions.append(Question(text, str(fields.get("category") or "all"), str(fields.get("id", number))))
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return questions


class Store(AbstractContextManager["Store"]):
    """Results by what was asked, in a file of JSON lines that is only appended to."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        *lines, torn = self._file.read().split(b"\n")
        try:
            if not torn.startswith(b'{"key": '[: len(torn)]):
                raise ValueError("the last line does not end")
            self._values = {kept["key"]: kept["value"] for kept in map(json.loads, lines)}
        except (ValueError, TypeError, KeyError) as error:
            self._file.close()
            raise ValueError(f"{path} is not a store of an evaluation: {error!r}") from error
        if torn:  # the process was killed while it wrote this line
            self._file.truncate(self._file.tell() - len(torn))

    async def get_or_make(self, make: Callable[[], Awaitable[Any]], **asked: Any) -> Any:
        """The stored result of ``asked``. If there is none, that of ``make`` is stored, unless it raises."""
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        if key not in self._values:
            self._values[key] = await make()
            self._file.write(json.dumps({"key": key, "value": self._values[key]}).encode() + b"\n")
            self._file.flush()
        return self._values[key]

    def __exit__(self, *error: object) -> None:
        self._file.close()


Outcome = Literal["first", "second", "tie", "unreadable", "failed"]

GENERAL = "general"
_WORDING = load_data("en")["judge"]
CRITERIA = tuple(_WORDING["criteria"])

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
    return str(_WORDING["request"]).format(question=question, first=first, second=second, criterion=asked)


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
        orders = (ours, other), (other, ours)
        asked = (self._judge(make_request(criterion, question, *order)) for order in orders)
        return Comparison(*await asyncio.gather(*asked))

    async def _judge(self, request: str) -> Outcome:
        async def ask() -> str:
            async with asyncio.timeout(self._timeout_seconds):
                return (await self._chain.ainvoke(request)).text

        try:
            reply = await self._store.get_or_make(ask, kind="reply", judge=self.label, request=request)
        except Exception:  # a failed judgement must not end the run; a resumed one retries it
            return "failed"
        return read_verdict(reply)
