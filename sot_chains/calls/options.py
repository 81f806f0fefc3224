"""Options of a chain and of one call, and what chains learn from answer to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig

from sot_chains.calls.prefix_cache import PromptCaching, find_known
from sot_chains.calls.rate_limits import Limiter, next_question
from sot_chains.calls.trace import Call, SotTrace
from sot_chains.calls.usage import Price
from sot_chains.outline.skeleton import Point, Thought
from sot_chains.prompts.profile import PROFILES, Detail, ModelProfile
from sot_chains.providers.base import Provider
from sot_chains.providers.errors import Retries
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.providers.vendor import VendorProvider

Policy = Literal["retry", "omit", "plain", "raise"]
Dispensable = Literal["prefill", "stop", "examples", "cache"]
OnFailure: TypeAlias = Policy | Callable[[Point, Exception], Policy]
Routing: TypeAlias = Runnable[LanguageModelInput, Any] | Literal["always", "unless_busy", "never"]


class Expectations:
    """What replies are expected to be like, learned from those that came.

    A typical length would be exceeded by half of them, so the longest lately is kept, fading slowly.
    """

    _FADE = 0.99

    def __init__(self) -> None:
        self.tokens = {"skeleton": 100.0, "points": 150.0, "plain": 500.0}  # written by a call of each stage
        self.num_answers = self.num_calls = 0  # that are being written
        self.opens_reasoning = False  # whether the template opens a block of it, in which replies begin
        # By the server or the chat template, of what requests can do without.
        self.refused: frozenset[Dispensable] = frozenset()

    def learn(self, stage: str, output_tokens: int) -> None:
        """Takes in what a call of ``stage`` wrote."""
        self.tokens[stage] = max(output_tokens, self.tokens[stage] * self._FADE)


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are written: what stays the same from question to question."""

    provider: Provider
    profile: ModelProfile
    max_points: int | None = None
    eager: bool = False
    on_failure: OnFailure = "retry"
    retries: Retries = field(default_factory=Retries)
    limiter: Limiter | None = None
    prices: Mapping[str, Price] | Price | None = None
    router: Routing = "always"
    caching: PromptCaching = field(default_factory=PromptCaching)
    detail: Detail = "normal"
    dependencies: bool = False
    conclusion: bool = False
    thoughts: tuple[Thought, ...] = ()  # the parts of an answer, if the user has given them
    expectations: Expectations = field(default_factory=Expectations)

    def __post_init__(self) -> None:
        if self.max_points is not None and self.max_points < 2:
            raise ValueError(
                f"max_points must be at least 2, got {self.max_points}: one point is a plain answer"
            )
        allowed = {"detail": get_args(Detail), "on_failure": get_args(Policy)}
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values and not callable(value):
                raise ValueError(f"{name} must be one of {values}, got {value!r}")
        known, provider = self.caching.find(self.provider), self.provider
        if known and not known.prefill and self.profile.prefill is None:
            self.expectations.refused |= {"prefill"}
        tiers = provider.tier_fields if isinstance(provider, VendorProvider) else {}
        if "fast" in tiers.values() and known and not known.fast:
            raise ValueError(f"{provider.model_name!r} has no fast tier, got {tiers}; omit it")

    @property
    def prefills(self) -> bool:
        """Whether replies are begun for the model, as far as is known by now."""
        known = isinstance(self.provider, VendorProvider) and self.provider.has_refused_prefill
        if known or "prefill" in self.expectations.refused:  # what the user says holds until then
            return False
        prefill = self.profile.prefill
        return self.provider.supports_prefill if prefill is None else prefill

    @property
    def opens_reasoning(self) -> bool:
        """Whether replies begin inside a block of reasoning, as far as is known by now."""
        if self.expectations.opens_reasoning or not isinstance(self.provider, LangChainProvider):
            return self.expectations.opens_reasoning
        return self.provider.local is not None and self.provider.local.opens_reasoning

    def policy(self, point: Point | None, error: Exception) -> Policy:
        """What to do about a point that failed; a call without a point is always tried again."""
        if point is None:
            return "retry"
        return self.on_failure(point, error) if callable(self.on_failure) else self.on_failure


def choose_profile(profile: ModelProfile | str | None, provider: Provider) -> ModelProfile:
    """The profile meant by the argument ``profile`` of a chain; ``None`` leaves it to the provider."""
    if isinstance(profile, ModelProfile):
        return profile
    if profile is None:
        is_local = isinstance(provider, LangChainProvider) and provider.local is not None
        is_elsewhere = isinstance(provider, VendorProvider) and provider.is_elsewhere
        is_elsewhere = is_elsewhere and find_known(provider) is None  # a gateway to a vendor's model
        return ModelProfile.SMALL if is_local or is_elsewhere else ModelProfile.STRONG
    if profile in PROFILES:
        return PROFILES[profile]
    raise ValueError(f"profile must be a ModelProfile or one of {tuple(PROFILES)}, got {profile!r}")


@dataclass
class CallOptions:
    """Options of one call."""

    parameters: dict[str, Any]  # what the model is told with each call: ``stop``, ``temperature``
    limit: asyncio.Semaphore | None = None  # of the calls in flight, perhaps shared with other answers
    deadline_seconds: float | None = None  # after which the text received so far is the answer
    resume: SotTrace | None = None  # of an earlier answer, whose missing points are to be written
    arrivals: Callable[[Any], None] | None = None  # takes each piece of a point as it is written
    route: Any = None  # of a router that has been asked already
    asked_before: Call | None = None  # whose text is dropped
    # Known when the run has begun: the config of the model calls and the id of the finished message.
    config: RunnableConfig = field(default_factory=RunnableConfig)
    message_id: str = ""
    question_number: int = field(default_factory=next_question)  # its place in the queue for the limits

    @classmethod
    def of(cls, arguments: Mapping[str, Any], limit: asyncio.Semaphore | None) -> CallOptions:
        """Takes the options of ours out of the ``arguments`` of a call."""
        parameters = dict(arguments)
        deadline_seconds = parameters.pop("deadline_seconds", None)
        if deadline_seconds is not None and not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds must be positive, got {deadline_seconds}")
        resume = parameters.pop("resume", None)
        trace = _trace_to_resume(resume) if resume else None
        ours = {name: parameters.pop(name, None) for name in ("arrivals", "route", "asked_before")}
        return cls(parameters, limit, deadline_seconds, trace, **ours)

    @staticmethod
    def calls_limit(config: RunnableConfig) -> asyncio.Semaphore | None:
        """Bounds the model calls that may be in flight under ``config``."""
        if (bound := config.get("max_concurrency")) is None:
            return None
        if bound < 1:
            raise ValueError(f'config["max_concurrency"] must be at least 1, got {bound}')
        return asyncio.Semaphore(bound)


def _trace_to_resume(resume: Any) -> SotTrace | None:
    if isinstance(resume, AIMessage):
        resume = resume.response_metadata.get("sot", resume)
    if resume is None or (isinstance(resume, Mapping) and {"skeleton", "points"} <= resume.keys()):
        return cast("SotTrace | None", resume)
    raise TypeError(
        'resume takes the trace of an earlier answer, message.response_metadata["sot"] or error.trace, '
        f"got {type(resume).__name__}"
    )
