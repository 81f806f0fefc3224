"""The provider protocol: what Skeleton-of-Thought needs from a model.

A provider streams one completion, and says whether the model continues a prefilled reply. Providers know
nothing of skeletons and points.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class SharedPrefix:
    """The prefix of the last user message that several requests share."""

    num_characters: int
    key: str  # equal for all requests that share it, so that they can be routed to where it is cached


@dataclass(slots=True)
class Delta:
    """A piece of a completion. Plain and slotted, since there is one per token."""

    text: str = ""  # since the last delta
    usage: UsageMetadata | None = None  # tokens to add to the completion's count, so no running totals
    finish_reason: str | None = None  # as the model reports it; on the last delta
    response_metadata: dict[str, Any] | None = None  # such as ``model_name``
    pause_seconds: float | None = None  # that the server asks to wait before the next request
    reasoning: str = ""  # since the last delta, if the server reports it apart from the text


Ending = Literal["whole", "calls", "length", "filtered", "failed"]
# The reasons of OpenAI, Anthropic, Google, Amazon, Cohere, Mistral, Ollama, vLLM, TGI and others, in letters.
_ENDINGS: Mapping[Ending, str] = {
    "whole": "stop(sequence|string|token)?(met|found|reached)?|stopcriteriamet|end(turn|ofturn|oftext)?|done|"
    "eos(token|found)?|completed?|finish(ed)?|normal",
    "calls": "tool(calls?|use)|functioncall",
    "length": "(model|max|context)?length(reached)?|max(imum|new|output|predicted)?tokens(reached)?|"
    "truncated|(token|error)?limit|modelcontextwindowexceeded",
    "filtered": "contentfilter(ed)?|(image)?safety|refusal|recitation|blocklist|prohibitedcontent|sensitive|"
    "guardrailintervened|errortoxic|spii|modelarmor",
}
_NO_LETTER = re.compile(r".*\.|(finish_)?reason_|[^a-z]")  # FinishReason.STOP, FINISH_REASON_STOP, end-turn


@lru_cache
def find_ending(finish_reason: str | None) -> Ending:
    """How a completion ended, by the reason that the model reports; any that is not known is a failure."""
    reason = "stop" if finish_reason is None else _NO_LETTER.sub("", finish_reason.lower())
    return next((ending for ending, known in _ENDINGS.items() if re.fullmatch(known, reason)), "failed")


@cache
def warn_once(message: str) -> None:
    """Logs that a request goes out without something that was asked for, once in a process."""
    _log.warning(message)


@runtime_checkable
class Provider(Protocol):
    """A model that streams completions."""

    @property
    def supports_prefill(self) -> bool:
        """Whether a final assistant message is continued rather than answered."""

    @property
    def model_name(self) -> str:
        """The model's name, for answers whose completions do not carry one."""

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


class ProviderError(RuntimeError):
    """A model call failed; the message names the server, the problem and what to check."""

    # Text and usage of the failed answer so far, which the chain sets; pass it as ``resume=`` to go on.
    trace: Mapping[str, Any] | None = None

    def __init__(
        self,
        message: str,
        *,
        is_retryable: bool = False,  # whether the same request may succeed later
        was_refused: bool = False,  # whether a busy server rejected it before doing any work
        is_unbilled: bool = False,  # whether it certainly used no tokens
        status: int | None = None,  # of HTTP
        retry_after_seconds: float | None = None,  # the wait that the server asked for
    ) -> None:
        super().__init__(message)
        self.is_retryable = is_retryable
        self.was_refused = was_refused
        self.is_unbilled = is_unbilled or status is not None  # an error instead of a reply
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class PrefillRefusedError(ProviderError):
    """The model does not continue a prefilled reply; remembered for all later requests."""


class PromptOverflowError(ProviderError, ContextOverflowError):
    """The prompt is longer than the model's context; callers that shorten it know LangChain's error."""


class DeadlineError(ProviderError, TimeoutError):
    """The deadline passed before there was any text to return."""
