"""What a completion is sent to: the two things Skeleton-of-Thought asks of a model.

A provider streams one completion, and says whether it can be made to continue a reply that was begun
for it. Providers know nothing of skeletons and points.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from langchain_core.messages import BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig


@dataclass(slots=True, frozen=True)
class RateLimits:
    """What a server says of its limits in the headers of a response; ``None`` where it says nothing.

    Attributes:
        requests: Requests allowed in a window.
        requests_left: Requests left in this one.
        requests_reset_seconds: When all of them are there again.
        tokens: Tokens allowed in a window.
        tokens_left: Tokens left in this one.
        tokens_reset_seconds: When all of them are there again.
    """

    requests: int | None = None
    requests_left: int | None = None
    requests_reset_seconds: float | None = None
    tokens: int | None = None
    tokens_left: int | None = None
    tokens_reset_seconds: float | None = None


@dataclass(slots=True, frozen=True)
class SharedPrefix:
    """The beginning of the last user message that several requests have in common.

    Attributes:
        num_characters: How long it is.
        key: The same for all requests that share it, so that they can be sent where it is cached.
    """

    num_characters: int
    key: str


@dataclass(slots=True)
class Delta:
    """A piece of a completion. Plain and slotted, since there is one per token.

    Attributes:
        text: What was written since the last piece, possibly nothing.
        usage: Tokens to add to the completion's count.
        finish_reason: Why the completion ended, in the model's words; on its last piece.
        response_metadata: Anything else the model says of the completion, such as ``model_name``.
        rate_limits: What the server says of its limits, on the first piece.
    """

    text: str = ""
    usage: UsageMetadata | None = None
    finish_reason: str | None = None
    response_metadata: dict[str, Any] | None = None
    rate_limits: RateLimits | None = None


@runtime_checkable
class Provider(Protocol):
    """A model that streams completions."""

    @property
    def supports_prefill(self) -> bool:
        """Whether a final assistant message is continued rather than answered."""
        ...

    @property
    def model_name(self) -> str:
        """The model's name, for answers whose completions do not carry one."""
        ...

    def stream(
        self, messages: Sequence[BaseMessage], *, config: RunnableConfig, **kwargs: Any
    ) -> AsyncIterator[Delta]:
        """Sends ``messages`` and yields the completion as it is written.

        Closing the iterator ends the request. A prefilled reply, if ``messages`` ends with one, is not
        part of what is yielded.

        Args:
            messages: The conversation.
            config: The callbacks, tags and ``run_name`` under which the call is announced.
            **kwargs: What the model understands: ``stop``, ``temperature`` and the like.

        Raises:
            ProviderError: The model could not be asked or did not answer.
        """
        ...


class ProviderError(RuntimeError):
    """A model could not be asked, refused, or broke off; the text says what was sent where and what to check.

    Attributes:
        is_retryable: Whether the same request may succeed later.
        was_refused: Whether the server was too busy to begin (too many requests, overload).
        is_unbilled: Whether it is known that no tokens were spent on it.
        status: The HTTP status, if there was one.
        retry_after_seconds: How long the server wants to be left alone, if it said so.
        rate_limits: What the server said of its limits.
        trace: What had been written and paid for of the answer that failed; pass it as ``resume=`` to go on
            from there. ``None`` before the chain has set it.
    """

    def __init__(
        self,
        message: str,
        *,
        is_retryable: bool = False,
        was_refused: bool = False,
        is_unbilled: bool = False,
        status: int | None = None,
        retry_after_seconds: float | None = None,
        rate_limits: RateLimits | None = None,
    ) -> None:
        super().__init__(message)
        self.is_retryable = is_retryable
        self.was_refused = was_refused
        self.is_unbilled = is_unbilled or status is not None  # an error in place of a reply
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        self.rate_limits = rate_limits
        self.trace: Mapping[str, Any] | None = None


class PrefillRefusedError(ProviderError):
    """The model does not continue a reply that was begun for it; remembered for all later requests."""


class DeadlineError(ProviderError, TimeoutError):
    """The deadline passed before there was anything to answer with."""
