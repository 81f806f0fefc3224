"""What a model that runs in this process offers beyond LangChain's interface.

``local_backend.ChatLocal`` is one; no package imports the other, so this is all they agree on. A test holds
both to it. Nothing else is ever asked of a model by name.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class ContinuesReplies(Protocol):
    """A model that says whether it continues a final assistant message; any chat model may have this."""

    @property
    def supports_assistant_prefill(self) -> bool:
        """Whether a final assistant message is continued rather than answered."""


@runtime_checkable
class LocalChatModel(ContinuesReplies, Protocol):
    """A local chat model, whose calls share one batch and take further parameters.

    The attributes named like parameters hold the values of a call that does not set them.
    """

    max_tokens: int | None
    min_tokens: int  # before which the model does not end a reply
    presence_penalty: float  # how much less likely tokens become that the reply already has
    stop: list[str] | None  # before which a reply ends

    @property
    def opens_reasoning(self) -> bool:
        """Whether the chat template begins each reply inside a block of reasoning."""

    @property
    def takes_grammars(self) -> bool:
        """Whether calls take ``grammar``: a Lark grammar of ``llguidance`` that bounds the reply."""

    def splitting_gain(self, num_answers: int, num_parts: int, part_tokens: int) -> float:
        """How many times as many tokens a second come if one of ``num_answers`` is in so many parts."""


@runtime_checkable
class WrapsModel(Protocol):
    """A chain that passes the arguments of its calls on to its model, such as ``RetrievalCopyChain``."""

    @property
    def model(self) -> object:
        """The model, if it is a Runnable; chat models call their names so."""
