"""What a completion is sent to: the two things Skeleton-of-Thought asks of a model.

A provider streams one completion, and says whether it can be made to continue a reply that was begun
for it. Providers know nothing of skeletons and points.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from langchain_core.messages import BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig


@dataclass(slots=True)
class Delta:
    """A piece of a completion. Plain and slotted, since there is one per token.

    Attributes:
        text: What was written since the last piece, possibly nothing.
        usage: Tokens to add to the completion's count.
        finish_reason: Why the completion ended, in the model's words; on its last piece.
        response_metadata: Anything else the model says of the completion, such as ``model_name``.
    """

    text: str = ""
    usage: UsageMetadata | None = None
    finish_reason: str | None = None
    response_metadata: dict[str, Any] | None = None


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
    """A model could not be asked or refused; the text says what was sent where and what to check."""
