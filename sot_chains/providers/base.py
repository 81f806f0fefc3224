"""The provider protocol: what Skeleton-of-Thought needs from a model.

A provider streams one completion, and says whether the model continues a prefilled reply. Providers know
nothing of skeletons and points.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from langchain_core.messages import BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig


@dataclass(slots=True, frozen=True)
class SharedPrefix:
    """The prefix of the last user message that several requests share.

    Attributes:
        num_characters: Length of the prefix.
        key: Equal for all requests that share it, so that they can be routed to where it is cached.
    """

    num_characters: int
    key: str


@dataclass(slots=True)
class Delta:
    """A piece of a completion. Plain and slotted, since there is one per token.

    Attributes:
        text: The text since the last delta, possibly empty.
        usage: Tokens to add to the completion's count, so no running totals.
        finish_reason: Why the completion ended, as the model reports it; on the last delta.
        response_metadata: Other metadata of the completion, such as ``model_name``.
        pause_seconds: How long the server asks to wait before the next request; on the first delta.
        reasoning: Reasoning since the last delta, if the server reports it apart from the text.
    """

    text: str = ""
    usage: UsageMetadata | None = None
    finish_reason: str | None = None
    response_metadata: dict[str, Any] | None = None
    pause_seconds: float | None = None
    reasoning: str = ""


Ending = Literal["whole", "length", "filtered", "failed"]
# The reasons of OpenAI, Anthropic, Google, Amazon, Cohere, Mistral, Ollama, vLLM, TGI and their like.
_ENDINGS: dict[Ending, tuple[str, ...]] = {
    "whole": (
        *("stop", "stop_sequence", "end_turn", "end_of_turn", "eos", "eos_token", "endoftext", "end", "done"),
        *("complete", "completed", "finished", "tool_calls", "tool_call", "tool_use", "function_call"),
    ),
    "length": (
        *("length", "max_tokens", "max_output_tokens", "model_length", "token_limit"),
        "model_context_window_exceeded",
    ),
    "filtered": (
        *("content_filter", "content_filtered", "safety", "refusal", "recitation", "prohibited_content"),
        *("blocklist", "guardrail_intervened", "sensitive", "error_toxic"),
    ),
}
_ENDING_BY_REASON = {reason: ending for ending, reasons in _ENDINGS.items() for reason in reasons}


def find_ending(finish_reason: str | None) -> Ending:
    """How a completion ended, by the reason that the model reports; any that is not known is a failure."""
    if finish_reason is None:
        return "whole"
    return _ENDING_BY_REASON.get(finish_reason.lower().rpartition(".")[2], "failed")  # FinishReason.STOP


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
        """Sends ``messages`` and yields the completion as it arrives.

        Closing the iterator ends the request. If ``messages`` ends with a prefilled reply, only its
        continuation is yielded.

        Args:
            messages: The conversation.
            config: Callbacks, tags and ``run_name`` of the call.
            **kwargs: Parameters of the model, such as ``stop`` and ``temperature``.

        Raises:
            ProviderError: The request failed, or the reply was interrupted.
        """
        ...


class ProviderError(RuntimeError):
    """A model call failed; the message names the server, the problem and what to check.

    Attributes:
        is_retryable: Whether the same request may succeed later.
        was_refused: Whether a busy server rejected it before doing any work (rate limit, overload).
        is_unbilled: Whether it certainly used no tokens.
        status: The HTTP status, if there was one.
        retry_after_seconds: The wait that the server asked for, if any.
        trace: Text and usage of the failed answer so far; pass it as ``resume=`` to continue from there.
            ``None`` until the chain sets it.
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
    ) -> None:
        super().__init__(message)
        self.is_retryable = is_retryable
        self.was_refused = was_refused
        self.is_unbilled = is_unbilled or status is not None  # an error instead of a reply
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        self.trace: Mapping[str, Any] | None = None


class PrefillRefusedError(ProviderError):
    """The model does not continue a prefilled reply; remembered for all later requests."""


class DeadlineError(ProviderError, TimeoutError):
    """The deadline passed before there was any text to return."""
