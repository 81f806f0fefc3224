"""What a call asks for, and the messages that ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage

from sot_chains.outline.skeleton import Point
from sot_chains.prompts.conversation import Conversation
from sot_chains.prompts.profile import ReplyBounds
from sot_chains.providers.base import SharedPrefix


@dataclass(slots=True)
class Request:
    """What a call asks for."""

    conversation: Conversation
    text: str | None = None  # what stands in place of the question; None for the question itself
    opening: str = ""  # added to ``text`` if the reply cannot be begun for the model
    reply_start: str = ""  # what the reply is begun with for models that continue one
    # Earlier turns that show what is asked for: request, the whole of a reply that is begun, and one unbegun.
    examples: Sequence[tuple[str, str, str]] = ()
    point: Point | None = None  # the point that is asked for, if it is one
    prefix: SharedPrefix | None = None  # what the messages share with those of other requests
    bounds: ReplyBounds = field(default_factory=ReplyBounds)  # besides where the model ends the reply
    parameters: Mapping[str, Any] = field(default_factory=dict)  # the user's own take precedence

    def messages(self, *, prefill: bool, written: str, shows_examples: bool) -> list[BaseMessage]:
        """The messages of one attempt; with ``prefill`` the model continues what is ``written`` by now."""
        start = self.reply_start + written if prefill else ""
        if self.text is None:
            messages = list(self.conversation.messages)
        else:
            text = self.text if prefill else self.text + self.opening
            shown = self.examples if shows_examples else ()
            turns = [(asked, begun if prefill else unbegun) for asked, begun, unbegun in shown]
            messages = self.conversation.asking(text, examples=turns)
        return [*messages, AIMessage(content=start)] if start else messages
