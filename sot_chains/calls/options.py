"""How answers are written: what the user has decided, and what chains learn from answer to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig

from sot_chains.calls.rate_limits import Limiter
from sot_chains.calls.retries import Retries
from sot_chains.calls.trace import SotTrace
from sot_chains.calls.usage import Price, price_for
from sot_chains.outline.skeleton import Point
from sot_chains.prompts.examples import Detail
from sot_chains.prompts.templates import Prompts, is_strong
from sot_chains.providers.base import Provider
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.providers.vendor import VendorProvider

Policy = Literal["retry", "omit", "plain", "raise"]
OnFailure: TypeAlias = Policy | Callable[[Point, Exception], Policy]
POLICIES = ("retry", "omit", "plain", "raise")


@dataclass(frozen=True)
class ReplyBounds:
    """Where a reply ends, besides where the model ends it.

    Attributes:
        stop: Strings before which it ends.
        max_tokens: Its tokens, at most, unless the user has set a bound; ``None`` for no bound.
        max_words: Words after which it ends with the sentence; ``None`` for no bound.
    """

    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    max_words: int | None = None


class Expectations:
    """What replies are expected to be like, learned from those that came.

    A typical length would be exceeded by half of them, so the longest lately is kept, fading slowly.

    Attributes:
        opens_reasoning: Whether replies begin inside a block of reasoning, because the template opens it.
        refuses_examples: Whether the server or the chat template has refused earlier turns.
        refuses_stop: Whether the server has refused stop strings.
    """

    _FADE = 0.98

    def __init__(self) -> None:
        self._tokens = {"skeleton": 100.0, "points": 150.0, "plain": 500.0}
        self.opens_reasoning = False
        self.refuses_examples = False
        self.refuses_stop = False

    def output_tokens(self, stage: str) -> int:
        """What a call of ``stage`` is expected to write."""
        return round(self._tokens[stage])

    def learn(self, stage: str, output_tokens: int) -> None:
        """Takes in what a call of ``stage`` wrote."""
        self._tokens[stage] = max(output_tokens, self._tokens[stage] * self._FADE)


@dataclass(frozen=True)
class SotOptions:
    """How answers are written: what stays the same from question to question."""

    provider: Provider
    prompts: Prompts | None = None
    prefill: bool | None = None
    max_points: int | None = None
    eager: bool = False
    on_failure: OnFailure = "retry"
    retries: Retries = field(default_factory=Retries)
    limiter: Limiter | None = None
    prices: Mapping[str, Price] | Price | None = None
    router: Runnable[LanguageModelInput, Any] | None = None
    detail: Detail = "normal"
    loop_guard: bool = True
    dependencies: bool = False
    conclusion: bool | Literal["first"] = False
    expectations: Expectations = field(default_factory=Expectations)

    def __post_init__(self) -> None:
        if self.max_points is not None and self.max_points < 2:
            raise ValueError(
                f"max_points must be at least 2, got {self.max_points}: one point is a plain answer"
            )
        if self.detail not in get_args(Detail):
            raise ValueError(f"detail must be one of {get_args(Detail)}, got {self.detail!r}")
        if self.conclusion not in (True, False, "first"):
            raise ValueError(f"conclusion must be True, False or 'first', got {self.conclusion!r}")
        if not callable(self.on_failure) and self.on_failure not in POLICIES:
            raise ValueError(f"on_failure must be one of {POLICIES} or a function, got {self.on_failure!r}")

    @property
    def prompts_in_use(self) -> Prompts:
        """The user's prompts, or those that suit the model."""
        if self.prompts is not None:
            return self.prompts
        return Prompts.short() if is_strong(self.provider.model_name) else Prompts()

    @property
    def prefills(self) -> bool:
        """Whether replies are begun for the model, as far as is known by now."""
        if self.prefill is None:
            return self.provider.supports_prefill
        # What the user says holds until the API has said otherwise.
        return self.prefill and not (
            isinstance(self.provider, VendorProvider) and self.provider.has_refused_prefill
        )

    @property
    def opens_reasoning(self) -> bool:
        """Whether replies begin inside a block of reasoning, as far as is known by now."""
        provider = self.provider
        return self.expectations.opens_reasoning or (
            isinstance(provider, LangChainProvider) and provider.opens_reasoning
        )

    @property
    def price(self) -> Price | None:
        """What the model costs, if the user has said so."""
        return price_for(self.provider.model_name, self.prices)

    def policy(self, point: Point | None, error: Exception) -> Policy:
        """What to do about a point that failed; a call without a point is always tried again."""
        if point is None:
            return "retry"
        return self.on_failure(point, error) if callable(self.on_failure) else self.on_failure


@dataclass(frozen=True)
class CallOptions:
    """Under what circumstances one answer is written.

    Attributes:
        config: The config of its model calls: who listens, tags, metadata.
        parameters: What the model is told with each call: ``stop``, ``temperature``.
        limit: Bounds the calls in flight, possibly together with those of other answers.
        message_id: The id of the finished message.
        deadline_seconds: After how long what is there is returned.
        question_number: The question's place in the queue for the account's limits.
        resume: The trace of an earlier answer to the same question, whose missing points are to be written.
    """

    config: RunnableConfig
    parameters: dict[str, Any]
    limit: asyncio.Semaphore | None
    message_id: str
    deadline_seconds: float | None = None
    question_number: int = 0
    resume: SotTrace | None = None


def calls_limit(config: RunnableConfig) -> asyncio.Semaphore | None:
    """Bounds the model calls that may be in flight under ``config``.

    Raises:
        ValueError: ``max_concurrency`` is below 1, which would wait forever.
    """
    if (bound := config.get("max_concurrency")) is None:
        return None
    if bound < 1:
        raise ValueError(f'config["max_concurrency"] must be at least 1, got {bound}')
    return asyncio.Semaphore(bound)


def positive_seconds(deadline_seconds: float | None) -> float | None:
    """Checks a deadline.

    Raises:
        ValueError: It is not positive.
    """
    if deadline_seconds is not None and not deadline_seconds > 0:
        raise ValueError(f"deadline_seconds must be positive, got {deadline_seconds}")
    return deadline_seconds


def trace_to_resume(resume: Any) -> SotTrace | None:
    """The trace to go on from.

    Raises:
        TypeError: It is none.
    """
    if isinstance(resume, AIMessage):
        resume = resume.response_metadata.get("sot", resume)
    if resume is None or (isinstance(resume, Mapping) and {"skeleton", "points"} <= resume.keys()):
        return cast("SotTrace | None", resume)
    raise TypeError(
        'resume takes the trace of an earlier answer, message.response_metadata["sot"] or error.trace, '
        f"got {type(resume).__name__}"
    )
